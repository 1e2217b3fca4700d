"""Runs of decoders in the test's process: the text is that of one process, whatever the cuts."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_layers import fail_layers
from text_ranks import PUZZLES, run_ranks

import pipeedge
from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.schedule import LayerRange, Schedule
from pipeedge.cli import chat
from pipeedge.control.changing import Switched
from pipeedge.data.step_queue import StepQueue
from pipeedge.data.tokenizer_files import read_backend
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.decoding.page_copies import CopiesOfPages
from pipeedge.decoding.vocabulary import Vocabulary
from pipeedge.models.decoder import find_decoder
from pipeedge.models.layers.decoder import DecoderStage
from pipeedge.models.step_rows import computing_layers, number_of_step, unpack_rows
from pipeedge.plan.facts import rank_facts
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import PlannedSchedule
from pipeedge.request.generation import GenerationRequest
from pipeedge.run import data_flow, decision, linked_stage, phases, pipeline
from pipeedge.run.decision import Decider, RunSession
from pipeedge.run.ledger import Ledger
from pipeedge.run.stage import StepStage
from pipeedge.transport.base import Packet

END = 3
SCHEDULED = ("-sm", "models.yml", "-sdt", "device_types.yml", "-sd", "devices.yml")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    path = PUZZLES / "tokenizer.json"
    return Vocabulary(read_backend(path), path, "puzzles", find_decoder(PUZZLES).config.vocab)


def answer_of_one_process(vocabulary: Vocabulary, text: str, dtype: torch.dtype) -> str:
    tokens = vocabulary.encode_rendered(vocabulary.render([{"role": "user", "content": text}]))
    decoder = LocalDecoder(find_decoder(PUZZLES), dtype, context=256)
    answer = decoder.generate(tokens, 40)
    return vocabulary.decode(answer[: answer.index(END)])


@pytest.mark.parametrize(
    ("world", "options", "dtype"),
    [
        (1, (), torch.float32),
        (2, ("-pt", "1,7,8,16", "--dtype", "bfloat16"), torch.bfloat16),
        (3, ("-pt", "1,1,2,6,7,16", "-r", "1,2,0"), torch.float32),
        (2, ("-pt", "1,16", "-r", "1"), torch.float32),
    ],
)
def test_text_is_that_of_one_process(
    capsys: pytest.CaptureFixture[str],
    vocabulary: Vocabulary,
    world: int,
    options: Sequence[str],
    dtype: torch.dtype,
) -> None:
    ranks = run_ranks(world, *options, "--prompt", "Sort 5 2 9 1.", "--quiet")
    assert [rank.error for rank in ranks] == [None] * world
    assert capsys.readouterr().out == answer_of_one_process(vocabulary, "Sort 5 2 9 1.", dtype) + "\n"


@pytest.mark.parametrize(("order", "thread"), [("0,1,2", ["collect"]), ("1,2,0", ["compute"]), ("1,0,2", [])])
def test_what_comes_second_on_the_data_rank_gives_way(
    monkeypatch: pytest.MonkeyPatch, order: str, thread: list[str]
) -> None:
    found = list[str]()
    for module in (linked_stage, data_flow):
        monkeypatch.setattr(module, "give_way", lambda: found.append(threading.current_thread().name))
    options = ("-pt", "1,4,5,8,9,16", "-r", order, "--prompt", "Spell so.", "--max-tokens", 4, "--quiet")
    assert [rank.error for rank in run_ranks(3, *options)] == [None] * 3
    assert found == thread


def answers(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_answers_are_in_input_order_and_the_same_for_any_number_at_a_time(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Spell house."}], "logprobs": 1},
        {"prompt_token_ids": [1, 50, 60, 3, 2], "max_tokens": 8, "temperature": 1, "seed": 7},
        {"prompt": "What is 1 + 2? ", "max_tokens": 3, "n": 2, "temperature": 1.5},
        *({"messages": [{"role": "user", "content": f"What is {n} + 7?"}]} for n in range(20)),
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    outputs, reports = [tmp_path / f"{n}.jsonl" for n in range(2)], [tmp_path / f"{n}.json" for n in range(2)]
    options = ("--input", prompts, "--quiet")
    cut = ("-pt", "1,5,6,16", "--output", outputs[0], "--report", reports[0], "-u", 5)
    # The cache has eight pages for 24 sequences of up to three, so that pages run out.
    (alone,) = run_ranks(1, *options, "-u", 1, "--output", outputs[1], "--report", reports[1])
    both = run_ranks(2, *options, *cut)
    assert [rank.error for rank in (alone, *both)] == [None] * 3
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    written = answers(outputs[0])
    assert [(one["item"], one.get("choice", 0)) for one in written] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        *((item, 0) for item in range(3, 23)),
    ]
    assert written[0]["text"] == "h-o-u-s-e"
    assert "logprobs" in written[0]
    texts = [json.loads(path.read_text())["text"] for path in reports]
    for figures in texts:
        assert figures["completion_tokens"] == sum(len(one["token_ids"]) for one in written)  # type: ignore[arg-type]
        assert figures["prefill_tokens_per_s"] > 0 < figures["decode_tokens_per_s"]
    assert sum(texts[0]["cache_bytes"]) == 5 * texts[1]["cache_bytes"][0]


@pytest.mark.parametrize("draft", [(), ("--draft", PUZZLES)])
def test_answers_are_the_same_when_ranks_fail(
    draft: Sequence[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four ranks are lost, one after the other; the second when all is computed once more."""
    ask = {"messages": [{"role": "user", "content": "Sort 5 2 9 1."}], "ignore_eos": True, "max_tokens": 90}
    digits = {"structured_outputs": {"regex": "[0-9]{30}"}}
    rows = [
        ask,
        {**ask, "temperature": 1, "n": 2, "frequency_penalty": 0.4, "logprobs": 2},
        {**ask, "temperature": 1, "seed": 3, "stop": ["7"]},
        {"prompt": "12345", "temperature": 1, "max_tokens": 200, "ignore_eos": True},
        {"prompt": "9 8 7", "temperature": 1, "max_tokens": 60, **digits},
    ]
    prompts, outputs = tmp_path / "prompts.jsonl", [tmp_path / f"{n}.jsonl" for n in range(2)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options = ("--input", prompts, "--quiet", "-u", 4, "--dtype", "bfloat16")
    cut = ("-pt", "1,5,6,8,9,13,14,16", "--timeout", 30, "--report", tmp_path / "report.json")
    (alone,) = run_ranks(1, *options, "--output", outputs[0])
    fail_layers(monkeypatch, {5: 40, 13: 75})
    ranks = run_ranks(4, *options, *cut, "--output", outputs[1], own=draft)
    assert [alone.error, ranks[0].error] == [None, None]
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    again = [line for line in ranks[0].warnings if "tokens computed again" in line]
    assert len(again) == 2, ranks[0].warnings
    epochs = json.loads((tmp_path / "report.json").read_text())["epochs"]
    assert [len(epoch["schedule"]) for epoch in epochs] == [4, 3, 2]


def answered_alone(
    tmp_path: Path, prompts: int, tokens: int, *more: object
) -> tuple[tuple[object, ...], list[Path]]:
    """Let one rank answer prompts, with so many tokens each; every other one is answered twice.

    Returns:
        The options, and the files for the answers: those of this rank, and of a run to compare with it.
    """
    ask = {"ignore_eos": True, "max_tokens": tokens}
    rows = [{"prompt": f"{n} 5 {n}", "temperature": n % 2, "n": 1 + n % 2, **ask} for n in range(prompts)]
    file, outputs = tmp_path / "prompts.jsonl", [tmp_path / f"{n}.jsonl" for n in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options = ("--input", file, "--quiet", *more, "--timeout", 30, "--speculate", 0)
    (alone,) = run_ranks(1, *options, "--output", outputs[0])
    assert alone.error is None
    return options, outputs


def test_copies_take_the_place_of_what_a_lost_rank_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a spare takes all layers of a rank that is lost, then another rank has all.

    Layers are cut within blocks.
    """
    options, outputs = answered_alone(tmp_path, 4, 240, "-u", 6)
    stored, step = CopiesOfPages.stored, DecoderStage.step
    copied = failed = 0

    def counted(self: CopiesOfPages, page: int, number: int) -> None:
        nonlocal copied
        stored(self, page, number)
        copied += 1

    def failing(self: DecoderStage, *rest: Any, **more: Any) -> Any:
        nonlocal copied, failed
        if self.layers.start == 5 and failed < 2:
            if copied >= 12:  # some of them are of the first steps, which are only measured
                copied, failed = 0, failed + 1
                raise RuntimeError("bad memory")
            time.sleep(0.005)  # so that pages are copied before the texts end, however busy the machine is
        return step(self, *rest, **more)

    monkeypatch.setattr(CopiesOfPages, "stored", counted)
    monkeypatch.setattr(DecoderStage, "step", failing)
    own = ("--replicate", "--report", tmp_path / "report.json")
    ranks = run_ranks(3, *options, "-pt", "1,5,6,16", "-r", "0,1", "--output", outputs[1], own=own)
    assert ranks[0].error is None
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    report = json.loads((tmp_path / "report.json").read_text())
    cuts = [[stage["layers"] for stage in epoch["schedule"]] for epoch in report["epochs"]]
    assert cuts == [[[1, 5], [6, 16]], [[1, 5], [6, 16]], [[1, 16]]]
    assert report["text"]["kept_tokens"] >= 6 * 32


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_lost_layers_alone_compute_again_from_the_outputs_in_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """First the second of three ranks is lost, then the last, so that rank 0 has all layers.

    Layers are cut within blocks.
    """
    options, outputs = answered_alone(tmp_path, 4, 200, "-u", 6, "--dtype", dtype)
    call, lost = StepStage.__call__, [(LayerRange(5, 10), 70), (LayerRange(5, 16), 140)]
    again = list[tuple[LayerRange, LayerRange]]()

    def spied(self: StepStage, packet: Packet, *rest: Any) -> Any:
        table = packet.payload[-1]
        layers, computing = self._stage.layers, computing_layers(table)
        longest = max(one.position for one in unpack_rows(table, self._bounds))
        measures = number_of_step(table) is None  # at any positions
        if lost and layers == lost[0][0] and longest >= lost[0][1] and not measures:
            del lost[0]
            raise RuntimeError("bad memory")
        if computing.start and layers.start < computing.start <= layers.stop:
            again.append((layers, computing))
        return call(self, packet, *rest)

    monkeypatch.setattr(StepStage, "__call__", spied)
    own = ("--keep-outputs", "--report", tmp_path / "report.json")
    cut = ("-pt", "1,5,6,10,11,16", "-r", "0,1,2")
    ranks = run_ranks(3, *options, *cut, "--output", outputs[1], own=own)
    assert ranks[0].error is None
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert not lost
    assert set(again) == {(LayerRange(0, 5), LayerRange(5, 10)), (LayerRange(0, 16), LayerRange(5, 16))}
    assert json.loads((tmp_path / "report.json").read_text())["text"]["partly_repeated_tokens"] >= 2 * 32


class Changer:
    """Changes the plan of a run on rank 0, each time after some more steps.

    No step is fed while a change is prepared, so that the run does not end before it, whatever the speed.

    Args:
        monkeypatch: Undoes what lets it take part.
        plans: First and last layer, and rank, of each stage of the plans.
        every: Number of steps before each change.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, plans: Sequence[Sequence[tuple[int, int, int]]], every: int
    ) -> None:
        self.outcomes: list[object] = []
        self._plans = iter(plans)
        self._every = every
        self._steps = 0
        self._decider: Decider | None = None
        self._session: RunSession | None = None
        self._begun = threading.Event()
        self._begun.set()
        write, agree = StepQueue.write, pipeline.agree
        change, wait_for_room = Ledger.change, Ledger.wait_for_room

        def counted(queue: StepQueue, *rest: Any) -> None:
            write(queue, *rest)
            self._steps += 1
            if self._steps % self._every == 0 and (plan := next(self._plans, None)) is not None:
                self._begun.clear()
                threading.Thread(target=self._change, args=(plan,), daemon=True).start()

        def agreed(context: Any, session: RunSession, prepared: Any) -> Plan:
            if session.serves_hub:
                self._session = session
            return agree(context, session, prepared)

        def decider(*rest: Any) -> Decider:
            made = Decider(*rest)
            if rest[0].rank == 0:
                self._decider = made
            return made

        def waiting(ledger: Ledger) -> int | None:
            self._begun.wait()
            return wait_for_room(ledger)

        def changing(ledger: Ledger, *rest: Any) -> None:
            change(ledger, *rest)
            self._begun.set()

        monkeypatch.setattr(Ledger, "change", changing)
        monkeypatch.setattr(Ledger, "wait_for_room", waiting)
        monkeypatch.setattr(StepQueue, "write", counted)
        monkeypatch.setattr(pipeline, "agree", agreed)
        monkeypatch.setattr(phases, "Decider", decider)

    def _change(self, stages: Sequence[tuple[int, int, int]]) -> None:
        decider, session = self._decider, self._session
        assert decider is not None
        assert session is not None
        assert decider.present is not None
        while (since := session.snapshot()) is None or not since.running:
            time.sleep(0.01)
        like = decider.present.schedule.stages[0]
        made = [replace(like, layers=LayerRange(first - 1, last), rank=rank) for first, last, rank in stages]
        planned = PlannedSchedule(Schedule(tuple(made)))
        self.outcomes.append(decider.change(session, planned, since, "a test", "changes"))
        self._begun.set()


def test_answers_are_the_same_when_the_plan_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers move between ranks that all go on, and the steps before the change end in the plan before.

    Then the last stage keeps its layers, and so do all stages.
    """
    options, outputs = answered_alone(tmp_path, 6, 200, "-u", 4)
    three = [(1, 7, 1), (8, 11, 0), (12, 16, 2)]
    plans = [[(1, 4, 0), (5, 16, 2)], three, [(1, 5, 0), (6, 11, 1), (12, 16, 2)]]
    changer = Changer(monkeypatch, [*plans, plans[-1]], 80)
    own = ("--report", tmp_path / "report.json", "--replicate")
    ranks = run_ranks(3, *options, "-pt", "1,8,9,16", "-r", "0,1", "--output", outputs[1], own=own)
    assert [rank.error for rank in ranks] == [None] * 3
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert [type(outcome) for outcome in changer.outcomes] == [Switched] * 4
    told = json.loads((tmp_path / "report.json").read_text())["text"]
    assert 0 < told["partly_repeated_tokens"] < told["repeated_tokens"]
    assert told["kept_tokens"] > 0


def test_a_run_goes_on_by_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("".join(f"What is {n} + 7?\n" for n in range(12)))
    options = ("--input", prompts, "--output", output, "--quiet", "-u", 3)
    write = StepQueue.write
    steps: list[int] = []

    def fail_after_some(self: StepQueue, number: int, *rest: Any) -> None:
        if self.items >= 2:
            raise PipeEdgeError("power failure")
        write(self, number, *rest)

    with monkeypatch.context() as broken:
        broken.setattr(StepQueue, "write", fail_after_some)
        (first,) = run_ranks(1, *options)
    assert str(first.error) == "power failure"
    assert not output.exists()
    (other,) = run_ranks(1, *options, "--resume", "--temperature", 0.5)
    assert "--resume" in str(other.error)
    other.error = None  # with its traceback, which keeps the unfinished output open
    gc.collect()

    def count_steps(self: StepQueue, number: int, *rest: Any) -> None:
        steps.append(number)
        write(self, number, *rest)

    monkeypatch.setattr(StepQueue, "write", count_steps)
    (second,) = run_ranks(1, *options, "--resume")
    assert second.error is None
    (whole,) = run_ranks(1, "--input", prompts, "--output", tmp_path / "whole.jsonl", "--quiet")
    assert whole.error is None
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("world", "options"),
    [(2, ("-pt", "1,7,8,16")), (1, ("--dtype", "int8")), (2, ("-pt", "1,7,8,16", "-q", "8,0"))],
)
def test_check_compares_each_token_with_float32(
    tmp_path: Path, world: int, options: Sequence[object]
) -> None:
    prompts, report = tmp_path / "prompts.txt", tmp_path / "report.json"
    prompts.write_text("What is 40 + 7?\nSpell house.\nSort 5 2 9 1.\n")
    given = ("--input", prompts, "--output", tmp_path / "out.jsonl", "--check", 2, "--report", report)
    ranks = run_ranks(world, *options, *given)
    assert [rank.error for rank in ranks] == [None] * world
    check = json.loads(report.read_text())["check"]
    written = answers(tmp_path / "out.jsonl")
    tokens = sum(len(one["token_ids"]) for one in written[:2])  # type: ignore[arg-type]
    assert (check["items"], check["same"], check["unit"]) == (tokens, tokens, "token")
    if options == ("-pt", "1,7,8,16"):
        assert (check["largest_deviation"], check["cosine_min"]) == (0.0, 1.0)
    else:
        assert 0 < check["largest_deviation"] < 2
        assert 0.99 < check["cosine_min"] < 1
    assert f"1.0000 of {tokens} tokens as in float32" in ranks[0].printed.getvalue()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kernels", "torch"), "--kernels torch"),
        (("--dtype", "float16"), "--dtype float16"),
        (("--objective", "energy", *SCHEDULED), "--objective energy"),
        (("--context", 257, "--prompt", "Spell a."), "--context 257"),
        (("--context", 256, "--cache-mb", 0.01, "--prompt", "Spell a."), "--cache-mb"),
        (("--dataset-name", "CoLA"), "--dataset-name CoLA"),
        ((), "--prompt TEXT"),
        (("--prompt", "x" * 256), "the context of 256"),
    ],
)
def test_what_a_decoder_cannot_do_is_one_line(options: Sequence[object], words: str) -> None:
    (rank,) = run_ranks(1, *options, "--quiet")
    assert isinstance(rank.error, PipeEdgeError)
    assert words in str(rank.error)
    assert rank.error.exit_code in (2, 3)


def test_a_draft_is_refused_unless_its_tokens_are_those_of_the_model(tmp_path: Path) -> None:
    def refused(*options: object) -> str:
        (rank,) = run_ranks(1, "--prompt", "Spell a.", "--quiet", *options)
        assert isinstance(rank.error, RequestError)
        return str(rank.error)

    other = shutil.copytree(PUZZLES, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    pieces = tokenizer["model"]["vocab"]
    pieces["a"], pieces["b"] = pieces["b"], pieces["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    number = min(pieces["a"], pieces["b"])
    assert refused("--draft", other) == (
        f"--draft {other}: its token {number} is another one than that of {PUZZLES}: give a model with the "
        "same tokenizer"
    )
    assert refused("--draft", "vit-digits").startswith("--draft vit-digits: vit-digits does not generate")
    (other / "tokenizer.json").unlink()
    assert refused("--draft", other).startswith(f"--draft {other}: no vocabulary for {other}")
    with pytest.raises(RequestError, match=r"^--draft proposes tokens: leave out --speculate 0$"):
        GenerationRequest(draft="llama-puzzles", speculate=0)


def test_the_plan_leaves_room_for_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    stated: list[int] = []

    def facts(*rest: Any, memory_bytes: int, **more: Any) -> Any:
        stated.append(memory_bytes)
        return rank_facts(*rest, memory_bytes=memory_bytes, **more)

    monkeypatch.setattr(decision, "available_bytes", lambda: 10**9)
    monkeypatch.setattr(decision, "rank_facts", facts)
    for draft in ((), ("--draft", PUZZLES)):
        (rank,) = run_ranks(1, "--prompt", "Spell a.", "--quiet", *draft)
        assert rank.error is None
    model = find_decoder(PUZZLES)
    cache = 4 * 256 // 32 * model.page_bytes(LayerRange(0, model.n_layers), torch.int8)[0]
    assert stated == [10**9, 10**9 - cache]


def test_an_encoder_has_no_options_of_decoders() -> None:
    (rank,) = run_ranks(1, "--context", 10, model=Path("vit-digits"))
    assert str(rank.error) == "--context: vit-digits does not generate text (docs/decoders.md)"


def test_python_asks_a_decoder_piece_by_piece(vocabulary: Vocabulary) -> None:
    with pipeedge.Pipeline("llama-puzzles", options=["--context", "64"]) as pipeline:
        assert pipeline.context == 64
        asked = [{"role": "user", "content": "Spell house."}]
        answer = pipeline.chat(asked)
        pieces = list(answer)
        assert "".join(pieces) == answer.text == "h-o-u-s-e"
        assert len(pieces) > 1
        assert answer.answer.finish_reason == "stop"
        tokens = vocabulary.encode_rendered(vocabulary.render(asked))
        same = [pipeline.generate(tokens, max_tokens=20) for _ in range(3)]
        assert [one.text for one in same] == [answer.text] * 3
        endless = pipeline.generate("a", ignore_eos=True, temperature=1.0)
        next(endless)
        endless.close()
        with pytest.raises(RequestError, match=r"given up before its end"):
            endless.answer  # noqa: B018
        with pytest.raises(RequestError, match=r"unknown field max_token"):
            pipeline.generate("a", max_token=3)
        with pytest.raises(RequestError, match=r"^llama-puzzles generates text: call generate or chat$"):
            pipeline("a sentence")
        with pytest.raises(RequestError, match=r"the context of 64 must have room"):
            pipeline.generate("a" * 64)
        unread = pipeline.generate("a", ignore_eos=True, temperature=1.0)
        unread.close()
        assert list(unread) == []
        left = pipeline.generate("a", ignore_eos=True, temperature=1.0)
        pipeline.close(abandon=True)
        with pytest.raises(PipeEdgeError):
            left.answer  # noqa: B018


def test_many_threads_and_tasks_ask_a_decoder_at_once() -> None:
    """Every text is the one that is generated alone, whoever else asks and gives up."""
    asked = [[{"role": "user", "content": f"What is {number} + {2 * number}?"}] for number in range(12)]

    async def ask_all(pipeline: pipeedge.Pipeline) -> list[str]:
        async def pieces(messages: list[dict[str, str]]) -> str:
            return "".join([piece async for piece in await pipeline.chat_async(messages, temperature=0)])

        async def whole(messages: list[dict[str, str]]) -> str:
            return (await (await pipeline.chat_async(messages, temperature=0)).whole()).text

        async def endless() -> None:
            async for _ in await pipeline.generate_async("a", ignore_eos=True, temperature=1.0):
                pass

        given_up = [asyncio.create_task(endless()) for _ in range(3)]
        ways = [pieces(one) if number % 2 else whole(one) for number, one in enumerate(asked)]
        found = await asyncio.gather(*ways)
        for task in given_up:
            task.cancel()
        ends = await asyncio.gather(*given_up, return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
        with pytest.raises(RequestError, match=r"unknown field max_token"):
            await pipeline.generate_async("a", max_token=3)
        return list(found)

    with pipeedge.Pipeline("llama-puzzles", options=["--context", "128"]) as pipeline:
        alone = [pipeline.chat(one, temperature=0).text for one in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            texts = list(pool.map(lambda one: pipeline.chat(one, temperature=0).text, asked))
        assert texts == alone
        assert alone[5] == "15"
        assert asyncio.run(ask_all(pipeline)) == alone


class Interrupted:
    """A pipeline whose user presses Ctrl-C after two pieces."""

    context = 10

    def __init__(self) -> None:
        self.closed = 0
        self.heard: list[list[dict[str, str]]] = []

    def chat(self, messages: list[dict[str, str]]) -> Interrupted:
        self.heard.append(messages)
        self.pieces = iter(["a", "b"])
        return self

    def __iter__(self) -> Interrupted:
        return self

    def __next__(self) -> str:
        try:
            return next(self.pieces)
        except StopIteration:
            raise KeyboardInterrupt from None

    def close(self) -> None:
        self.closed += 1


def test_an_interrupt_ends_the_answer_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/new\nthree\n"))
    pipeline = Interrupted()
    chat.converse(pipeline, "be brief")  # type: ignore[arg-type]
    assert capsys.readouterr().out == "ab\n" * 3
    assert pipeline.closed == 3
    system = {"role": "system", "content": "be brief"}
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "ab"}]
    assert pipeline.heard == [
        [system, said[0]],
        [system, *said, {"role": "user", "content": "two"}],
        [system, {"role": "user", "content": "three"}],
    ]


@pytest.mark.parametrize(
    "links", [("-q", "8,8"), ("--adaptive", "heuristic", "--send-constraint", 500, "-q", "8,0")]
)
def test_text_crosses_compressed_links(tmp_path: Path, links: Sequence[object]) -> None:
    prompts, output, report = tmp_path / "p.txt", tmp_path / "out.jsonl", tmp_path / "r.json"
    prompts.write_text("".join(f"What is {n} + 7?\n" for n in range(10, 20)))
    ranks = run_ranks(
        *(2, "-pt", "1,7,8,16", "--input", prompts, "--output", output, "--report", report, "--quiet", *links)
    )
    assert [rank.error for rank in ranks] == [None, None]
    right = [one["text"] == str(number + 7) for number, one in enumerate(answers(output), start=10)]
    assert sum(right) >= len(right) - 1
    sent = json.loads(report.read_text())["stages"][0]
    assert 0 < sent["transformed_fraction"] <= 1 or "--adaptive" in links
