#!/usr/bin/env python3
"""Train ``llama-puzzles``, the small decoder that PipeEdge ships, on puzzles that this script makes up.

    python tools/train_llama_puzzles.py            train, measure on puzzles never seen, write the directory

Each puzzle has one right answer, so that answers can be counted:

    What is 47 + 85?            132
    Sort 5 2 9 1.               1 2 5 9
    Reverse melon.              nolem
    Spell house.                h-o-u-s-e
    How many e in cheese?       3

A text of training is a conversation of many puzzles; a fifth of the texts have no roles, only questions and
answers. The vocabulary is one token for each byte, and four more. One thread and one seed make the run
reproducible on one kind of processor; elsewhere the last digits of the weights may differ.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import string
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

MODEL_DIRECTORY = Path(__file__).resolve().parents[1] / "pipeedge" / "assets" / "llama-puzzles"

PAD, USER, ASSISTANT, END = range(4)
SPECIAL = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SEED = 0
STEPS = 8000
BATCH = 16
LENGTH = 256  # tokens of a text, and the model's context
PEAK_RATE = 3e-3
WARMUP_STEPS = 300
WEIGHT_DECAY = 0.01
WITHOUT_ROLES = 0.2
HELD_OUT_SHARE = 16  # one of so many puzzles is never trained on
HELD_OUT_ITEMS = 200  # of each kind


@dataclass(frozen=True)
class Puzzle:
    """A question with its one answer."""

    question: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether the puzzle is for measuring alone."""
        return zlib.crc32(self.question.encode()) % HELD_OUT_SHARE == 0


def make_word(source: random.Random) -> str:
    """Make up a word of three to eight letters, most of them pronounceable."""
    length = source.randint(3, 8)
    if source.random() < 0.3:
        return "".join(source.choices(string.ascii_lowercase, k=length))
    vowels, begins = "aeiou", source.random() < 0.5
    consonants = "".join(sorted(set(string.ascii_lowercase) - set(vowels)))
    return "".join(source.choice(vowels if (at % 2 == 0) == begins else consonants) for at in range(length))


def make_sum(source: random.Random) -> Puzzle:
    """Add two numbers below 100."""
    first, second = source.randint(0, 99), source.randint(0, 99)
    return Puzzle(f"What is {first} + {second}?", str(first + second))


def make_sorting(source: random.Random) -> Puzzle:
    """Sort three to six digits."""
    digits = source.choices(string.digits, k=source.randint(3, 6))
    return Puzzle(f"Sort {' '.join(digits)}.", " ".join(sorted(digits)))


def make_reversing(source: random.Random) -> Puzzle:
    """Write a word backwards."""
    word = make_word(source)
    return Puzzle(f"Reverse {word}.", word[::-1])


def make_spelling(source: random.Random) -> Puzzle:
    """Write a word letter by letter."""
    word = make_word(source)
    return Puzzle(f"Spell {word}.", "-".join(word))


def make_counting(source: random.Random) -> Puzzle:
    """Count a letter in a word that has few different letters."""
    letters = source.sample(string.ascii_lowercase, source.randint(2, 4))
    word = "".join(source.choices(letters, k=source.randint(3, 8)))
    letter = source.choice(letters)
    return Puzzle(f"How many {letter} in {word}?", str(word.count(letter)))


KINDS: dict[str, Callable[[random.Random], Puzzle]] = {
    "sums": make_sum,
    "sorting": make_sorting,
    "reversing": make_reversing,
    "spelling": make_spelling,
    "counting": make_counting,
}


def make_puzzle(source: random.Random, kind: str, *, held_out: bool) -> Puzzle:
    """Draw a puzzle of a kind that is, or is not, held out."""
    while True:
        puzzle = KINDS[kind](source)
        if puzzle.held_out is held_out:
            return puzzle


def token_ids(text: str) -> list[int]:
    """Return the tokens of a text without special ones: a token for each byte."""
    return [len(SPECIAL) + byte for byte in text.encode()]


def prompt_ids(puzzle: Puzzle, *, roles: bool) -> list[int]:
    """Return the tokens that ask a question, up to where the answer begins."""
    if roles:
        return [USER, *token_ids(puzzle.question), END, ASSISTANT]
    return token_ids(f"{puzzle.question} ")


def make_text(source: random.Random) -> tuple[list[int], list[bool]]:
    """Make up a conversation; return ``LENGTH + 1`` tokens, and which of them belong to answers."""
    tokens: list[int] = []
    answers: list[bool] = []
    roles = source.random() >= WITHOUT_ROLES
    while len(tokens) <= LENGTH:
        puzzle = make_puzzle(source, source.choice(list(KINDS)), held_out=False)
        asked, answer = prompt_ids(puzzle, roles=roles), [*token_ids(puzzle.answer), END]
        tokens += [*asked, *answer]
        answers += [False] * len(asked) + [True] * len(answer)
    return tokens[: LENGTH + 1], answers[: LENGTH + 1]


def build_model() -> torch.nn.Module:
    """Return a newly initialised Llama of 4 blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.08,  # the usual 0.02 is meant for widths of thousands
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )
    return LlamaForCausalLM(config)


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate as a fraction of its peak: linear warm-up, then half a cosine to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)))


def train(model: torch.nn.Module, steps: int, seed: int) -> None:
    """Fit ``model`` in place to texts; only the tokens of answers count."""
    source = random.Random(seed)
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_RATE,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    model.train()
    total = 0.0
    for step in range(1, steps + 1):
        texts = [make_text(source) for _ in range(BATCH)]
        tokens = torch.tensor([text for text, _ in texts])
        counted = torch.tensor([answers for _, answers in texts])[:, 1:]
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits[counted], tokens[:, 1:][counted])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += float(loss.detach())
        if step % 100 == 0 or step == steps:
            print(f"step {step:5d}/{steps}  training loss {total / 100:.4f}", file=sys.stderr, flush=True)
            total = 0.0
    model.eval()


def answer(model: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Answer prompts of one length, taking the likeliest token each time."""
    tokens = torch.tensor(prompts)
    start = tokens.shape[1]
    with torch.inference_mode():
        while tokens.shape[1] < start + 20 and not bool((tokens[:, start:] == END).any(1).all()):
            tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], dim=1)
    answers = []
    for row in tokens[:, start:].tolist():
        ids = row[: row.index(END)] if END in row else row
        answers.append(bytes(max(0, one - len(SPECIAL)) for one in ids).decode(errors="replace"))
    return answers


def count_correct(model: torch.nn.Module, seed: int) -> dict[str, int]:
    """Return the number of right answers to held-out puzzles of each kind, half of them without roles."""
    source = random.Random(seed)
    correct = {}
    for kind in KINDS:
        puzzles = [make_puzzle(source, kind, held_out=True) for _ in range(HELD_OUT_ITEMS)]
        by_length: dict[int, list[tuple[list[int], str]]] = {}
        for number, puzzle in enumerate(puzzles):
            prompt = prompt_ids(puzzle, roles=number % 2 == 0)
            by_length.setdefault(len(prompt), []).append((prompt, puzzle.answer))
        correct[kind] = sum(
            given == wanted
            for group in by_length.values()
            for given, (_, wanted) in zip(answer(model, [prompt for prompt, _ in group]), group, strict=True)
        )
    return correct


def write_tokenizer(directory: Path) -> None:
    """Write ``tokenizer.json`` and its settings: a token for each byte, and the template of conversations."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {name: number for number, name in enumerate(SPECIAL)}
    vocabulary |= {shown: len(SPECIAL) + byte for byte, shown in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        model_max_length=LENGTH,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


def write_model(model: torch.nn.Module, directory: Path) -> None:
    """Write the model in bfloat16, its tokenizer and its ``generation_config.json`` to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config.do_sample = False
    model.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # transformers writes it for the owner alone
    write_tokenizer(directory)


def main() -> None:
    """Train, measure once on held-out puzzles, and write the model."""
    parser = argparse.ArgumentParser(description="Train the llama-puzzles model that PipeEdge ships.")
    parser.add_argument("--output", type=Path, default=MODEL_DIRECTORY, help="model directory to write")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of {BATCH} texts")
    parser.add_argument("--seed", type=int, default=SEED, help="initial weights, and puzzles")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    model = build_model()
    train(model, options.steps, options.seed)
    elapsed = time.perf_counter() - started
    model.to(torch.bfloat16)  # as it is shipped; computed with in float32, as it is measured
    stored = {name: weight.clone() for name, weight in model.state_dict().items()}
    correct = count_correct(model.to(torch.float32), options.seed + 1)
    model.to(torch.bfloat16).load_state_dict(stored)
    write_model(model, options.output)
    training = {
        "held_out": {"correct": correct, "of_each": HELD_OUT_ITEMS},
        "steps": options.steps,
        "texts": options.steps * BATCH,
        "seed": options.seed,
        "torch": torch.__version__,
    }
    text = json.dumps(training, indent=2) + "\n"
    (options.output / "training.json").write_text(text, encoding="utf-8")
    print(f"trained in {elapsed:.0f} s", file=sys.stderr)
    print("  ".join(f"{kind} {count}/{HELD_OUT_ITEMS}" for kind, count in correct.items()))


if __name__ == "__main__":
    main()
