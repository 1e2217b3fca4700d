"""Cases of test_troubleshooting.py: prompts, chat templates and options of answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from places import ROOT
from transformers import AutoTokenizer
from trouble import Cases, Patch, refused, start

from pipeedge.decoding import template_program
from pipeedge.decoding.prompt import PromptMaker
from pipeedge.decoding.sampling import Sampling, read_generation_config
from pipeedge.decoding.structure import Structure
from pipeedge.decoding.template import TemplateRenderer
from pipeedge.decoding.vocabulary import Vocabulary

CASES = Cases()
says = CASES.says

PUZZLES = ROOT / "pipeedge" / "assets" / "llama-puzzles"
MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}]


def maker(template: str | None = None) -> PromptMaker:
    """Return a maker of prompts for the shipped model, with another chat template or none."""
    backend = AutoTokenizer.from_pretrained(PUZZLES)
    backend.chat_template = template
    return PromptMaker(Vocabulary(backend, PUZZLES / "tokenizer.json", "./puzzles", 260), Sampling(), 256)


def ask(**document: object) -> str:
    """Return what is said of a line of prompts.jsonl."""
    return refused(lambda: maker("{{ messages[0].content }}").from_document(document, 6, "prompts.jsonl:7"))


@says("prompts.jsonl:7: the prompt is empty; --skip-bad-input leaves such rows out")
def an_empty_prompt(patch: Patch) -> str:
    lines = [json.dumps({"prompt": text}) for text in ("a", "b", "c", "d", "e", "f", "")]
    Path("prompts.jsonl").write_text("\n".join(lines))
    return start(f"0 1 -m {PUZZLES} --input prompts.jsonl")


@says("prompts.jsonl:7: the prompt has 300 tokens; the context of 256 must have room for one more: …")
def a_prompt_longer_than_the_context(patch: Patch) -> str:
    return ask(prompt="a" * 300)


@says("prompts.jsonl:7: the prompt has token 999; the model's are 0 to 259")
def a_token_that_the_model_lacks(patch: Patch) -> str:
    return ask(prompt_token_ids=[5, 999])


@says("prompts.jsonl:7: unknown field max_token; did you mean max_tokens?")
def a_field_that_is_spelt_wrong(patch: Patch) -> str:
    return ask(prompt="a", max_token=3)


@says("prompts.jsonl:7: temperature is -1.0; 0 to 100 are possible")
def an_option_out_of_range(patch: Patch) -> str:
    return ask(prompt="a", temperature=-1)


@says("… ./puzzles has no chat template, so it takes no messages: give --prompt, or a file with prompt …")
def no_chat_template(patch: Patch) -> str:
    return refused(lambda: maker().from_document({"messages": MESSAGES}, 0, "prompts.jsonl:1"))


@says("… the chat template refuses this conversation: it reads the attribute '__class__' of str, which is …")
def a_template_that_reads_attributes(patch: Patch) -> str:
    wrong = maker("{{ ''.__class__ }}")
    return refused(lambda: wrong.from_document({"messages": MESSAGES}, 0, "prompts.jsonl:1"))


@says("… the chat template refuses this conversation: it has not finished after 10 seconds")
def a_template_that_does_not_end(patch: Patch) -> str:
    late = {"error": "it has not finished after 10 seconds"}
    patch.setattr(TemplateRenderer, "_ask", lambda renderer, line: late)
    return ask(messages=MESSAGES)


@says("… the chat template refuses this conversation: it needs more than 512 MB")
def a_template_that_wants_memory(patch: Patch) -> str:
    def full(template: str) -> None:
        raise MemoryError

    patch.setattr(template_program, "_compiled", full)
    return ask(messages=MESSAGES)


@says("… the model's chat template takes no tools")
def a_template_without_tools(patch: Patch) -> str:
    tool = {"type": "function", "function": {"name": "add"}}
    return ask(messages=MESSAGES, tools=[tool])


@says("….json: top_p is 7.0; above 0 and up to 1 are possible; correct it, or remove the file")
def nonsense_in_the_generation_config(patch: Patch) -> str:
    return refused(lambda: read_generation_config({"top_p": 7}, {}, "generation_config.json", 260))


@says("structured answers need the package llguidance: pip install 'pipeedge[serve]'")
def llguidance_is_not_installed(patch: Patch) -> str:
    patch.setitem(sys.modules, "llguidance", None)
    return refused(lambda: maker().vocabulary.matcher(Structure("regex", "a"), ()))
