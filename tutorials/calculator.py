"""The calculator of ``calculator.yaml``: the tool that the policy may call, and the rewards of its conversations."""

from __future__ import annotations

from typing import Any

Metadata = dict[str, Any]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first factor.
        b: the second factor.
    """
    return a * b


def right(question: str, answer: str, metadata: Metadata) -> float:
    """1 if the last answer of the conversation is the product."""
    return float(answer.strip() == metadata["answer"])


def called(question: str, answer: str, metadata: Metadata) -> float:
    """1 if the policy has called a tool."""
    return float(any(message["role"] == "tool" for message in metadata["messages"]))


def failed(question: str, answer: str, metadata: Metadata) -> float:
    """1 if a call has failed: its result is then the error."""
    results = [message["content"] for message in metadata["messages"] if message["role"] == "tool"]
    return float(any(result.startswith("Error: ") for result in results))


def turns(question: str, answer: str, metadata: Metadata) -> float:
    """The number of answers in the conversation."""
    return float(sum(message["role"] == "assistant" for message in metadata["messages"]))
