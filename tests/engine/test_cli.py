"""The command line: one line for bad input, the same tokens with and without a drafter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import fixtures
from engine import Engine, KVQuantization, LogitsOptions, Request, Sampling, Stream, Target
from engine.cli import main
from engine.drafters.registry import KINDS
from fixtures import random_drafters

from .conftest import finish_of
from .pools import spec_of
from .test_adapters import fresh, write_adapter
from .test_chat import without_template
from .test_drafters import copy_with_config
from .test_quantize import BUDGET, mlx_lm_tokens

TARGET = str(fixtures.target_dir("dense"))
DRAFT = str(fixtures.drafter_dir("dense-draft"))
ONE_OF_EACH = (
    ("dense", "off"),
    ("dense", "ngram"),
    ("dense", "two-model"),
    ("dense", "dspark"),
    ("sliding", "assistant"),
    ("sliding", "deepspec"),
    ("hybrid", "mtp"),
    ("mla", "mtp"),
)


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine", "generate", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})}
    )


@pytest.mark.parametrize("sampling", [(), ("--seed", "1", "--temp", "0.8")], ids=["greedy", "temp"])
def test_drafters_give_the_same_tokens(sampling: tuple[str, ...]) -> None:
    """`lossless`, `lossless-sampled` as a user sees them."""
    base = ("--target", TARGET, "--prompt", "Name: Anna. Say it again: ", "--json", *sampling)
    answers = [
        json.loads(run(*base, "--max-tokens", "24", *drafter).stdout)
        for drafter in ((), ("--drafter", "ngram"), ("--drafter", f"two-model:{DRAFT}"))
    ]
    for answer in answers:
        assert set(answer) == {"tokens", "text", "finish_reason", "usage", "seed", "statistics"}
        for key in ("tokens", "text", "finish_reason", "usage", "seed"):
            assert answer[key] == answers[0][key]
    assert answers[0]["tokens"]
    assert answers[2]["statistics"]["drafted"] > 0


@pytest.mark.parametrize(("family", "kind"), ONE_OF_EACH)
def test_statistics_are_by_position_for_every_drafter(family: str, kind: str) -> None:
    """As JSON, and in the line behind a text; the sums are the totals."""
    target, drafter = str(fixtures.target_dir(family)), spec_of(family, kind)
    base = ("--target", target, "--drafter", drafter, "--depth", "3", "--max-tokens", "24")
    done = run(*base, "--prompt", "Name: Anna. Say it again: ", "--json")
    told = json.loads(done.stdout)["statistics"]
    by_position = told["accepted_by_position"], told["drafted_by_position"]
    assert [sum(counts) for counts in by_position] == [told["accepted"], told["drafted"]]
    shares = ", ".join(f"{a}/{d}" for a, d in zip(*by_position, strict=True))
    line = run(*base, "--prompt", "Name: Anna. Say it again: ").stderr
    assert (f"(by position {shares})" in line) is (kind != "off")
    assert (told["drafted"] > 0) is (kind != "off")


def test_the_least_confidence_shortens_drafts_and_leaves_the_text() -> None:
    """`lossless`: at 0 drafts are whole, at 1 there are none, between some are cut."""
    base = ("--target", TARGET, "--prompt", "Name: Anna. Say it again: ", "--json")
    how = ("--max-tokens", "24", "--drafter", spec_of("dense", "dspark"))
    answers = [
        json.loads(run(*base, *how, "--min-confidence", least).stdout)
        for least in ("0", "0.6", "1")
    ]
    assert len({tuple(answer["tokens"]) for answer in answers}) == 1
    whole, cut, none = (answer["statistics"]["drafted"] for answer in answers)
    assert whole > cut > none == 0


def test_help_and_refusal_name_every_kind() -> None:
    helped = " ".join(run("--help").stdout.split())
    assert f"off | ngram | mtp | KIND:DIR | DIR, KIND one of {', '.join(KINDS)};" in helped
    refused = run("--target", TARGET, "--prompt", "x", "--drafter", "eagle").stderr
    assert f"(drafters: off, ngram, mtp, {', '.join(f'{k}:DIR' for k in KINDS)}, DIR)" in refused
    assert set(KINDS) == {"two-model", "mtp", "assistant", "dspark", "deepspec"}


def test_text_streams_to_stdout_and_the_summary_to_stderr() -> None:
    done = run("--target", TARGET, "--prompt", "Name: Anna. Say it again: ", "--max-tokens", "8")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1)
    assert "rounds" in done.stderr
    assert done.stdout.strip()


def test_trouble_with_kept_states_is_a_warning_and_no_other_text(tmp_path: Path) -> None:
    asked = ("--target", TARGET, "--prompt", "Name: Anna. Say it again: ", "--max-tokens", "8")
    first = run(*asked, "--ssd-cache", str(tmp_path))
    files = list(tmp_path.rglob("*.safetensors"))
    assert files
    for file in files:
        file.write_bytes(b"damaged")
    second = run(*asked, "--ssd-cache", str(tmp_path))
    assert (second.returncode, second.stdout) == (0, first.stdout)
    (warned, summary) = second.stderr.splitlines()
    assert warned.startswith("warning: a damaged entry was removed: ")
    assert "rounds" in summary


def test_a_prompt_file_gives_one_object_per_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffName: Anna.\r\n\nИмя:\u2028Анна.\n", encoding="utf-8", newline="")
    done = run("--target", TARGET, "--prompt-file", str(file), "--json", "--max-tokens", "4")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["usage"]["prompt_tokens"] for line in lines] == [
        len("Name: Anna."),
        len("Имя:\u2028Анна.".encode()),
    ]


def test_kv_flags_give_mlx_lms_quantized_text(target: Target) -> None:
    """`lossless`: with and without a drafter."""
    prompt = "The end. Once"
    expected = mlx_lm_tokens(target, target.encode(prompt), 2048, KVQuantization(2, 32, 8))
    for drafter in ("off", "ngram"):
        base = ("--target", TARGET, "--prompt", prompt, "--json", "--max-tokens", str(BUDGET))
        flags = ("--kv-bits", "2", "--kv-group-size", "32", "--quantized-kv-start", "8")
        answer = json.loads(run(*base, *flags, "--drafter", drafter).stdout)
        assert answer["tokens"] == expected
    # Else nothing was quantized.
    assert expected != json.loads(run(*base).stdout)["tokens"]


def test_an_adapter_is_used_and_a_drafter_that_has_none_is_named(
    target: Target, tmp_path: Path
) -> None:
    """`lossless`: two-model steps aside with one line, n-gram drafts."""
    prompt = "Name: Anna. Say it again: "
    adapter = write_adapter(tmp_path / "a", fresh())
    expected = finish_of(target.adapted(adapter), target.encode(prompt), max_tokens=48)
    base = ("--target", TARGET, "--adapter", str(adapter), "--prompt", prompt, "--json")
    for drafter in ("off", "ngram", DRAFT):
        done = run(*base, "--max-tokens", "48", "--drafter", drafter)
        answer = json.loads(done.stdout)
        assert answer["tokens"] == list(expected.tokens)
        assert (answer["statistics"]["drafted"] > 0) is (drafter == "ngram")
        warned = f"warning: drafter {DRAFT} does not support adapters and is not used\n"
        assert done.stderr == (warned if drafter == DRAFT else "")


@pytest.mark.parametrize("chat", [False, True])
def test_every_flag_reaches_the_request(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chat: bool,
) -> None:
    """And `--chat` makes the prompt a user's message."""
    requests: list[Request] = []

    submit = Engine.submit

    def recording(self: Engine, request: Request, **options: Any) -> Stream:
        requests.append(request)
        return submit(self, request, **options)

    monkeypatch.setattr(Engine, "submit", recording)
    options = {"max-tokens": 3, "temp": 0.7, "top-p": 0.9, "top-k": 9, "min-p": 0.01, "seed": 4}
    options |= {"xtc-probability": 0.25, "xtc-threshold": 0.3}
    options |= {"repetition-penalty": 1.1, "repetition-context-size": 5}
    options |= {"presence-penalty": -0.5, "presence-context-size": 6}
    options |= {"frequency-penalty": 0.125, "frequency-context-size": 0}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags += ["--rng", "sequential", "--stop", "x", "--stop", "yz"]
    flags += ["--logit-bias", "65=-1.5", "--logit-bias", "66=-inf"]
    arguments = ["--target", TARGET, "--prompt", "Hi", "--json", *flags, *["--chat"] * chat]
    monkeypatch.setattr(sys, "argv", ["engine", "generate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    logits = LogitsOptions(1.1, 5, -0.5, 6, 0.125, 0, ((65, -1.5), (66, -float("inf"))))
    sampling = Sampling(0.7, 0.9, 9, 0.01, 4, "sequential", 0.25, 0.3, logits)
    messages = [{"role": "user", "content": "Hi"}]
    ids = target.encode_chat(messages) if chat else target.encode("Hi")
    assert requests == [Request(tuple(ids), 3, sampling, stop_strings=("x", "yz"))]
    answer = json.loads(capsys.readouterr().out)
    assert answer["usage"]["prompt_tokens"] == len(ids)


def folder(tmp_path: Path, name: str, files: dict[str, str]) -> str:
    path = tmp_path / name
    path.mkdir()
    for file, content in files.items():
        (path / file).write_text(content)
    return str(path)


def test_bad_input_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on stdout, no traceback; the line names the value and the limit."""
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n")
    no_weights = folder(tmp_path, "w", {"config.json": '{"model_type": "llama"}'})
    unknown = str(copy_with_config(Path(DRAFT), tmp_path / "u", model_type="nope"))
    bare = str(without_template(tmp_path / "bare").path)
    headless = str(random_drafters.dflash(tmp_path / "dflash", Path(TARGET), 1))
    good, sure = ("--target", TARGET, "--prompt", "x"), ("--min-confidence", "0.5")
    cases = [
        (("--target", "/nowhere", "--prompt", "x"), "model folder /nowhere does not exist"),
        (("--target", str(tmp_path), "--prompt", "x"), "has no config.json"),
        (("--target", no_weights, "--prompt", "x"), "has no weights"),
        (("--target", unknown, "--prompt", "x"), "Model type nope not supported"),
        (("--target", TARGET), "exactly one of --prompt and --prompt-file"),
        (("--target", TARGET, "--prompt", ""), "--prompt is empty"),
        (("--target", TARGET, "--prompt-file", str(latin)), "not UTF-8 (byte 3)"),
        (("--target", TARGET, "--prompt-file", str(blank)), "at least 1 line"),
        (("--target", TARGET, "--prompt-file", str(tmp_path)), "cannot read prompt file"),
        ((*good, "--adapter", "/nowhere"), "adapter folder /nowhere does not exist"),
        ((*good, "--adapter", str(tmp_path)), "has no adapter_config.json"),
        (
            (*good, "--ssd-cache", ""),
            "--ssd-cache is empty; a folder is needed",
        ),
        (
            (*good, "--ssd-cache", str(tmp_path), "--checkpoint-tokens", "0"),
            "--checkpoint-tokens must be at least 1, got 0",
        ),
        ((*good, "--depth", "-1"), "--depth must be at least 0, got -1"),
        ((*good, "--kv-bits", "7"), "kv_bits must be one of 2, 3, 4, 5, 6, 8, got 7"),
        ((*good, "--kv-bits", "0"), "got 0"),
        ((*good, "--kv-bits", "8", "--kv-group-size", "48"), "one of 32, 64, 128, got 48"),
        ((*good, "--kv-bits", "8", "--kv-group-size", "128"), "kv_bits cannot serve this model"),
        ((*good, "--kv-bits", "8", "--quantized-kv-start", "-1"), "at least 0, got -1"),
        ((*good, "--max-tokens", "0"), "--max-tokens must be at least 1, got 0"),
        ((*good, "--temp", "-1"), "temperature must be at least 0"),
        ((*good, "--temp", "-1"), "got -1"),
        (("--target", TARGET, "--prompt", "\udcff"), "the prompt is not UTF-8"),
        (("--target", "x" * 5000, "--prompt", "x"), "does not exist"),
        ((*good, "--drafter", "x" * 5000), "does not exist"),
        ((*good, "--top-k", "100000", "--temp", "1"), "top_k must be below the vocabulary size"),
        ((*good, "--rng", "lunar"), "got 'lunar'"),
        ((*good, "--depth", "three"), "--depth"),
        ((*good, "--no-such-flag"), "--no-such-flag"),
        ((*good, "--stop", ""), "stop string is empty"),
        ((*good, "--repetition-penalty", "-1"), "repetition_penalty must be at least 0"),
        ((*good, "--presence-penalty", "inf"), "presence_penalty must be within -1e30..1e30"),
        ((*good, "--frequency-context-size", "-1"), "frequency_context_size must be between 0"),
        ((*good, "--xtc-probability", "2"), "xtc_probability must be between 0 and 1, got 2.0"),
        ((*good, "--xtc-threshold", "0.6"), "xtc_threshold must be between 0 and 0.5, got 0.6"),
        ((*good, "--logit-bias", "5"), "--logit-bias must be ID=BIAS, an id and a number, got '5'"),
        ((*good, "--logit-bias", "a=1"), "--logit-bias must be ID=BIAS"),
        ((*good, "--logit-bias", "5=x"), "--logit-bias must be ID=BIAS"),
        (
            (*good, "--logit-bias", "5=nan"),
            "logit_bias of id 5 must be a number of at most 1e30, got nan",
        ),
        ((*good, "--logit-bias", "300=1"), "logit_bias ids must be below the vocabulary size 288"),
        (("--target", bare, "--prompt", "x", "--chat"), "bare has no chat template"),
        (("--target", TARGET, "--prompt", "\udcff", "--chat"), "content is not UTF-8"),
        ((*good, "--drafter", "ngram:x"), "takes no model path"),
        ((*good, "--drafter", "eagle"), "does not exist"),
        ((*good, "--min-confidence", "0.5"), "--min-confidence 0.5 needs a --drafter"),
        *(
            ((*good, *sure, "--drafter", spec), f"drafter {kind} has no confidence head")
            for kind, spec in (
                ("off", "off"),
                ("ngram", "ngram"),
                ("mtp", "mtp"),
                ("two-model", DRAFT),
                ("assistant", spec_of("sliding", "assistant")),
                ("mtp", spec_of("hybrid", "mtp")),
            )
        ),
        ((*good, *sure, "--drafter", headless), f"{headless}: there is no confidence head"),
        (
            (*good, "--min-confidence", "1.5", "--drafter", spec_of("dense", "dspark")),
            "a confidence must be between 0 and 1, got 1.5",
        ),
    ]
    for arguments, message in cases:
        monkeypatch.setattr(sys, "argv", ["engine", "generate", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, errors = capsys.readouterr()
        assert (ended.value.code, out) == (2, ""), (arguments, errors)
        assert len(errors.splitlines()) == 1, errors
        assert errors.startswith("error: ")
        assert message in errors


def test_bad_input_from_a_shell() -> None:
    done = run("--target", "/nowhere", "--prompt", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: model folder /nowhere does not exist\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "engine", "generate", "--target", TARGET, "--prompt", "x"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "--json"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (2, "error: cannot write: No space left on device\n")


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_that_has_seen_enough_is_no_failure(flags: tuple[str, ...]) -> None:
    """As `head`: exit 0, and nothing is said."""
    command = [sys.executable, "-m", "engine", "generate", "--target", TARGET, *flags]
    command += ["--prompt", "Name: Anna. Say it again: ", "--max-tokens", "48"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


def test_output_that_nobody_wants_is_no_failure() -> None:
    """Closed by a shell's `>&-`."""
    command = f"{sys.executable} -m engine generate --target {TARGET} --prompt x --json >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS needs no compiler at run time")
def test_a_missing_compiler_is_said() -> None:
    done = run("--target", TARGET, "--prompt", "x", env={"PATH": "/nonexistent"})
    assert done.returncode == 2
    assert done.stderr == "error: no C++ compiler: mlx on Linux needs `g++` on PATH at run time\n"


def test_ctrl_c_is_one_line_and_exit_130(tmp_path: Path) -> None:
    """In the middle of many prompts, after the first answer."""
    file = tmp_path / "prompts.txt"
    file.write_text("Name: Anna.\n" * 10_000)
    command = [sys.executable, "-m", "engine", "generate", "--target", TARGET]
    command += ["--prompt-file", str(file), "--max-tokens", "8", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "interrupted\n"


def test_ctrl_c_is_one_line_while_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), str(fixtures.ROOT.parent)])
    with subprocess.Popen(
        [sys.executable, "-m", "engine", "generate"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("first", "second", "code", "said"),
    [
        (signal.SIGINT, signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGTERM, signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGINT, signal.SIGTERM, 143, ""),
        (signal.SIGTERM, signal.SIGTERM, 143, ""),
    ],
)
def test_a_second_signal_ends_it_at_once(
    first: signal.Signals, second: signal.Signals, code: int, said: str
) -> None:
    """Also while what the first one has begun waits for a thread."""
    text = [
        "import threading, time",
        "threading.Thread(target=time.sleep, args=(60,)).start()",
        "try:",
        "    print(1, flush=True)",
        "    time.sleep(60)",
        "finally:",
        "    print(2, flush=True)",
        "    time.sleep(60)",
    ]
    assert signalled(text, first, second) == (code, said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_behind_the_end_changes_nothing(number: signal.Signals) -> None:
    """While the interpreter drops its modules, which takes mlx a moment."""
    text = [
        "import os, time",
        "class Slow:",
        "    def __del__(self, write=os.write, sleep=time.sleep):",
        "        write(1, b'1\\n')",
        "        sleep(2)",
        "slow = Slow()",
    ]
    assert signalled(text, number) == (0, "")


def signalled(text: list[str], *numbers: signal.Signals) -> tuple[int, str]:
    """Exit code and stderr of a program that gets the first one once it says 1, and so on."""
    begin = ["from engine.signals import leave_at_once, leave_in_order", "leave_at_once()"]
    program = [*begin, "with leave_in_order():", *(f"    {line}" for line in text)]
    with subprocess.Popen(
        [sys.executable, "-c", "\n".join(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for said, number in enumerate(numbers, 1):
            assert process.stdout.readline() == f"{said}\n"
            process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    return process.returncode, errors


def test_a_target_drafts_with_its_own_layer_unless_told_otherwise() -> None:
    """`lossless`; not with mlx-lm's draws, whose plain stream is what is asked for."""
    base = ("--target", str(fixtures.target_dir("mla")), "--prompt", "Name: Anna. Say it", "--json")
    drafted: dict[tuple[str, ...], int] = {}
    tokens: dict[tuple[str, ...], list[int]] = {}
    for flags in ((), ("--drafter", "off"), ("--drafter", "mtp"), ("--drafter", "ngram")):
        answer = json.loads(run(*base, "--max-tokens", "16", *flags).stdout)
        tokens[flags] = answer["tokens"]
        drafted[flags] = answer["statistics"]["drafted"]
    assert len({tuple(ids) for ids in tokens.values()}) == 1
    assert drafted[()] == drafted[("--drafter", "mtp")] > 0
    assert drafted[("--drafter", "off")] == 0
    assert drafted[("--drafter", "ngram")] != drafted[()]
    sequential = ("--rng", "sequential", "--temp", "0.8", "--seed", "1")
    answer = json.loads(run(*base, "--max-tokens", "4", *sequential).stdout)
    assert answer["statistics"]["drafted"] == 0


def test_an_own_layer_that_cannot_be_used_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "mla"
    shutil.copytree(fixtures.target_dir("mla"), folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights.pop("model.layers.3.enorm.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    base = ("--target", str(folder), "--prompt", "Name: Anna", "--json", "--max-tokens", "4")
    refused = run(*base)
    assert refused.returncode == 2
    assert "lacks tensors: enorm.weight (--drafter off decodes without it)" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert run(*base, "--drafter", "off").returncode == 0
