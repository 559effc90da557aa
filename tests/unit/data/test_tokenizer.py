"""Tokenizers: the byte tokenizer, a small tokenizer.json with chat templates, and SmolLM2's against
`transformers`."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import psutil
import pytest

from disagg.errors import ConfigError
from mpillm.data.chat_template import ChatTemplate
from mpillm.data.tokenizer import Tokenizer, TooLongError, load_tokenizer
from tests.helpers.support import has_ended, wait_until

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TRICKY = [
    "Hi",
    "  two\n\n1 lines\t ",
    "naïve 東京 🐌👩‍👩‍👧",
    "<|im_end|> inside",
    "12345 + 6 = ½",
    "{{ messages }} {% if %}",
    "a" * 5000,
    "\x00\u200b",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tokenizer of bytes, the merge `ab` and three special tokens: two first and one last."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "ab"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def settings(folder: Path, **content: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def text(tokenizer: Tokenizer, prompt: str) -> str:
    """Return what the model is given, special tokens included."""
    return "".join(tokenizer._tokenizer.id_to_token(i) for i in tokenizer.encode(prompt))  # type: ignore[attr-defined]


def test_plain_text_has_no_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_plain("abab") == tokenizer.encode("abab")[1:] == [258, 258]
    assert tokenizer.encode_plain("") == []


def test_bytes() -> None:
    tokenizer = load_tokenizer(None)
    assert tokenizer.encode("aé") == tokenizer.encode_plain("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.encode_batch(["a", "bc"]) == [[97], [98, 99]]
    assert (tokenizer.vocab_size, tokenizer.plain_tokens) == (256, range(256))
    for prompt in TRICKY:
        assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
    assert tokenizer.decode(np.array([97, 300, -1, 98], np.int32)) == "a\ufffd\ufffdb"
    assert tokenizer.decode([]) == ""


TEXT_METHODS: list[Callable[[Tokenizer], object]] = [
    lambda tokenizer: tokenizer.encode("a"),
    lambda tokenizer: tokenizer.encode_batch(["a"]),
    lambda tokenizer: tokenizer.encode_chats([[{"role": "user", "content": "a"}]]),
    lambda tokenizer: tokenizer.render([{"role": "user", "content": "a"}]),
    lambda tokenizer: tokenizer.encode_text("a"),
    lambda tokenizer: tokenizer.encode_plain("a"),
    lambda tokenizer: tokenizer.decode([1]),
]


@pytest.mark.parametrize("use", TEXT_METHODS)
def test_a_folder_without_tokenizer_has_none(tmp_path: Path, use: Callable[[Tokenizer], object]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in it; a text has no tokens without it"):
        use(load_tokenizer(tmp_path))


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("tokenizer.model", r"sentencepiece protobuf\): `python3 -c '.*AutoTokenizer"),
        ("tekken.json", r"transformers\): `python3 -c '.*convert_tekken_tokenizer as t; t\(d \+ "),
    ],
)
def test_another_format_is_not_taken_for_bytes(tmp_path: Path, name: str, remedy: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=rf"{name} but no tokenizer\.json; write one \(pip .*{remedy}"):
        load_tokenizer(tmp_path)


def test_a_list_of_extra_special_tokens(folder: Path) -> None:
    settings(folder, extra_special_tokens=["<s>", "<|end|>"], chat_template="{{ messages[0].content }}")
    assert text(load_tokenizer(folder), "a<|end|>") == "a<|end|>"


def test_without_chat_template(folder: Path) -> None:
    """The post-processor's special tokens are added; the file's truncation and padding are ignored."""
    tokenizer = load_tokenizer(folder)
    assert text(tokenizer, "abcdefgh") == "<s>abcdefgh"
    assert tokenizer.encode_batch(["ab", "a"]) == [tokenizer.encode("ab"), tokenizer.encode("a")]
    assert tokenizer.vocab_size == 2 + 256 + 1 + 1
    assert tokenizer.plain_tokens == range(2, 259)
    for prompt in TRICKY:
        if "<|" not in prompt:
            assert tokenizer.decode(np.array(tokenizer.encode(prompt), np.int32)) == prompt
    assert tokenizer.decode([0, 258, 259, 1, 10**6]) == "ab"


def test_chat_template(folder: Path) -> None:
    settings(
        folder,
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        unk_token=None,
        chat_template="{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}{{"
        " eos_token }}\n"
        "  {% endif %}\n{% endfor %}{% if add_generation_prompt %}a{{ '<|end|>' }}{% endif %}{{ unk_token }}",
    )
    assert text(load_tokenizer(folder), "ab") == "<s>ab</s>Ċa<|end|>"
    assert text(load_tokenizer(folder, apply_chat_template=False), "ab") == "<s>ab"


def test_chat_template_features(folder: Path) -> None:
    """Templates have what `transformers` offers them: tojson, loop controls, the generation tag,
    strftime_now, and no tools."""
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "old"}))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}"
        "{{ strftime_now('%Y') | length }}{% if tools %}x{% endif %}{{ eos_token }}"
    )
    settings(folder, eos_token="</s>", chat_template="not this one")
    assert (
        text(load_tokenizer(folder), '<é"')
        == text(load_tokenizer(folder, apply_chat_template=False), '01"<é\\""4') + "</s>"
    )


def test_named_chat_templates(folder: Path) -> None:
    settings(
        folder,
        chat_template=[
            {"name": "tool_use", "template": "T"},
            {"name": "default", "template": "D{{ messages[0].content }}"},
        ],
    )
    assert text(load_tokenizer(folder), "x") == "Dx"
    settings(folder, chat_template=[{"name": "tool_use", "template": "T"}])
    assert text(load_tokenizer(folder), "x") == "<s>x"


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"{", "tokenizer.json is not a tokenizer"),
        (
            "tokenizer.json",
            b'{"version": "1.0", "model": {"type": "Unheard"}}',
            "tokenizer.json is not a tokenizer",
        ),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", b'{"chat_template": ', "tokenizer_config.json:1: not valid JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: not a JSON object"),
        ("tokenizer_config.json", POINTER, "tokenizer_config.json: a Git LFS pointer"),
        ("tokenizer.json", POINTER, "tokenizer.json is not a tokenizer .*: a Git LFS pointer"),
        ("tokenizer_config.json", b'{"chat_template": 7}', "chat_template is int"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
        ("chat_template.jinja", b"{% if %}", "chat template does not parse"),
        (
            "chat_template.jinja",
            b"{{ raise_exception('system message needed') }}",
            "fails on these messages: system message needed",
        ),
        ("chat_template.jinja", b"{{ messages[3].content }}", "fails on these messages"),
        ("chat_template.jinja", b"{{ messages.append(1) }}", "fails on these messages"),
    ],
)
def test_malformed(folder: Path, file: str, content: bytes, message: str) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(folder).encode("x")


@pytest.mark.parametrize("module", ["tokenizers", "jinja2"])
def test_missing_extra(folder: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "chat_template.jinja").write_text("x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'mpillm\[tokenizer\]'"):
        load_tokenizer(folder)


def test_nothing_heavy_is_imported(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("x")
    program = (
        "import sys, pathlib; from mpillm.data.tokenizer import load_tokenizer;"
        " load_tokenizer(None);print([name for name in ('tokenizers', 'jinja2') if name in sys.modules]);"
        " load_tokenizer(pathlib.Path(sys.argv[1])).encode('x');print([name for name in ('transformers',"
        " 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n[]\n"


@pytest.mark.skipif("MPILLM_TEST_MODEL" not in os.environ, reason="MPILLM_TEST_MODEL names no model folder")
def test_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from mpillm.data.dataset import BUILTIN_PROMPTS

    model = Path(os.environ["MPILLM_TEST_MODEL"])
    reference = transformers.AutoTokenizer.from_pretrained(model)
    chat, plain = load_tokenizer(model), load_tokenizer(model, apply_chat_template=False)
    prompts = TRICKY + [
        json.loads(line)["prompt"] for line in BUILTIN_PROMPTS.read_text(encoding="utf-8").splitlines()
    ]
    for prompt, tokens in zip(prompts, chat.encode_batch(prompts), strict=True):
        messages = [{"role": "user", "content": prompt}]
        assert tokens == reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        ), prompt
        assert plain.encode(prompt) == reference(prompt)["input_ids"], prompt
        assert plain.decode(tokens) == reference.decode(tokens, skip_special_tokens=True), prompt
    assert chat.vocab_size == len(reference)
    assert not set(reference.all_special_ids) & set(chat.plain_tokens)


GROWS = "{%% set n = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}{{ n.x }}"
LONG = "{% set n = namespace(x='a' * 9999999, y=[]) %}"
BOMBS = {
    "rounds": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "one call of C": "{% set n = 10 ** 9 %}{{ 10 ** n }}",
    "a product": "{{ 'a' * 10000000000 }}",
    "a width": "{{ 'a'|center(10000000000) }}",
    "doubled": GROWS % ("'a'", "n.x ~ n.x"),
    "lists of lists": GROWS % ("['a']", "[n.x, n.x]"),
    "searched": LONG + "{% for i in range(99999) %}{{ 'b' in n.x }}{% endfor %}",
    "printed": "{% for i in range(99999) %}{{ 'y' * 99999 }}{% endfor %}",
    "computed at compile time": "{{ 'a'|center(99999)|center(10000000000) }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_template_takes_no_more_than_it_may(source: str) -> None:
    """A few bytes of a model from anywhere asked for hours, or for all memory. The next chat is rendered."""
    began, peak = time.process_time(), getrusage(RUSAGE_SELF).ru_maxrss
    choice = "{% if messages[0].content == 'a' %}" + source + "{% endif %}x"
    with pytest.raises(ConfigError, match=r"it takes (more than 0\.3 s of CPU time|too much memory)"):
        template = ChatTemplate(choice, {}, max_cpu_s=0.3, max_bytes=200 << 20)
        template.render([[{"content": "b"}], [{"content": "a"}]])
    if source != BOMBS["computed at compile time"]:
        assert template.render([[{"content": "b"}]] * 600) == ["x"] * 600
    assert time.process_time() - began < 5 and getrusage(RUSAGE_SELF).ru_maxrss - peak < 100 << 10  # KiB


def template_and_child(source: str) -> tuple[ChatTemplate, psutil.Process]:
    """Return a template and its process."""
    before = psutil.Process().children()
    template = ChatTemplate(source, {})
    (child,) = (process for process in psutil.Process().children() if process not in before)
    return template, child


def test_the_process_of_a_template_ends() -> None:
    """With the object, and with this process whatever ends it."""
    template, child = template_and_child("x")
    del template
    child.wait(300)
    program = (
        "import os, psutil\n"
        "from mpillm.data.chat_template import ChatTemplate\n"
        "template = ChatTemplate('x', {})\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    wait_until(lambda: has_ended(int(done.stdout)), "its end")


def test_a_killed_process_is_named_and_started_again() -> None:
    template, child = template_and_child("{{ messages[0].content }}")
    child.kill()
    with pytest.raises(ConfigError, match=r"the process that renders it was ended by signal 9 \(SIGKILL\)"):
        template.render([[{"content": "a"}]])
    assert template.render([[{"content": "a"}]]) == ["a"]


def test_texts_survive_the_way_to_the_process() -> None:
    texts = [*TRICKY, "\ud83d alone", "b" * 3_000_000]
    template = ChatTemplate("{{ messages[0].content|length }}", {})
    assert template.render([[{"content": text}] for text in texts]) == [str(len(text)) for text in texts]


@pytest.mark.long
def test_many_long_chats_stay_within_the_memory_of_the_process() -> None:
    """All chats of a data set were in few messages: 256 long ones did not fit."""
    template = ChatTemplate("{{ messages[0].content|length }}", {}, max_bytes=200 << 20)
    assert template.render([[{"content": "a" * 1_000_000}]] * 256) == ["1000000"] * 256


def test_a_lower_limit_of_the_user_stays() -> None:
    """Only root may raise it: the process of other users ended at its start."""
    program = (
        "import psutil, resource\n"
        "from mpillm.data.chat_template import ChatTemplate\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))\n"
        "template = ChatTemplate('x', {})\n"
        "print(psutil.Process().children()[0].rlimit(psutil.RLIMIT_AS))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{(1 << 29, 1 << 29)}\n", done.stderr


def test_long_chats_are_no_bombs(folder: Path) -> None:
    text = (
        "{% set n = namespace(last='') %}{% for m in messages %}"
        "{% if m.role in ['user', 'system'] and m.content is string %}{{ '<s>' + m.role ~ m.content|trim }}"
        "{% endif %}{% set n.last = m.content.replace('a', 'bb') %}{% endfor %}{{ n.last }}" + " " * 20_000
    )
    (folder / "chat_template.jinja").write_text(text)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_chats([[{"role": "user", "content": "ab"}] * 4_000])
    assert tokenizer.encode_chats([[{"role": "user", "content": "ab" * 200_000}]])


def _replaces(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


DOUBLES = [_replaces("a", "aa")] * 40
TALL = {"special_tokens": {"a": {"id": "a", "ids": [0] * 999, "tokens": ["a"] * 999}}, "pair": []}
GROWING = {
    "doubled": {"normalizer": {"type": "Sequence", "normalizers": DOUBLES}},
    "between all": {"normalizer": {"type": "Sequence", "normalizers": [_replaces("", "a" * 40)] * 2}},
    "before all": {"normalizer": {"type": "Prepend", "prepend": "a" * 9999}},
    "decoded": {"decoder": {"type": "Sequence", "decoders": DOUBLES}},
    "repeated": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "a", "type_id": 0}}]
            * 999,
            **TALL,
        }
    },
}


@pytest.mark.parametrize("parts", GROWING.values(), ids=GROWING)
def test_a_tokenizer_makes_no_text_thousands_of_times_as_long(folder: Path, parts: dict[str, Any]) -> None:
    """Forty replacements of a file from anywhere asked for all memory."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    with pytest.raises(ConfigError, match=r"not a tokenizer that .* makes a text .* times as long"):
        load_tokenizer(folder)


@pytest.mark.long
def test_a_text_on_which_a_tokenizer_fails_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Llama 3's regular expression looks back over all of 11 million blanks: Rust's panic is no Exception.

    Its backtrace is not printed, whatever the environment says.
    """
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    file = folder / "tokenizer.json"
    split = {
        "type": "Split",
        "pattern": {"Regex": r"\s*[\r\n]+|\s+"},
        "behavior": "Isolated",
        "invert": False,
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_tokenizer": split}))
    tokenizer = load_tokenizer(folder)
    for encode in (tokenizer.encode_plain, tokenizer.encode_text, tokenizer.encode):
        with pytest.raises(ConfigError, match=r"fails on this text: .*retry-limit"):
            encode(" " * 11_000_000 + "x")
    assert "stack backtrace" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["file", "bytes"])
def test_a_text_of_far_too_many_tokens_takes_little_memory(folder: Path, kind: str) -> None:
    """A token takes some 400 bytes while a text is read: 15 MB of a stranger's took gigabytes."""
    tokenizer = load_tokenizer(folder if kind == "file" else None)
    text = "a1!" * 5_000_000
    peak = getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(TooLongError, match="more than 20000 tokens"):
        tokenizer.encode_text(text, 20_000)
    assert getrusage(RUSAGE_SELF).ru_maxrss - peak < 200 << 10  # KiB
    longest = text[:100_000]
    assert tokenizer.encode_text(longest, 100_000) == tokenizer.encode_text(longest)
    assert len(tokenizer.encode_text(longest, 1_000_000)) > 60_000


def test_while_a_long_text_becomes_tokens_other_threads_go_on(folder: Path) -> None:
    """The event loop is one of them: 54,000 characters held up all others for 50 ms."""
    tokenizer = load_tokenizer(folder)
    began: list[float] = []
    ended = threading.Event()

    def tick() -> None:
        while not ended.is_set():
            began.append(time.perf_counter())
            time.sleep(0.001)

    other = threading.Thread(target=tick)
    other.start()
    try:
        start = time.perf_counter()
        tokenizer.encode_text("hello there " * 40_000)
        took = time.perf_counter() - start
    finally:
        ended.set()
        other.join()
    gaps = [after - before for before, after in itertools.pairwise(began)]
    assert max(gaps) < max(0.1, took / 2), (max(gaps), took)


HONEST = {
    "counts what is left": "{% for m in messages[::-1] %}{{ messages|length - loop.index0 }}{% endfor %}",
    "looks back": "{% for m in messages %}{% set n = namespace(role='') %}{% for i in range(loop.index0) %}"
    "{% set e = messages[loop.index0] %}{% if e.role != 'tool' %}{% set n.role = e.role %}{% endif %}"
    "{% endfor %}{{ n.role }}{% endfor %}" + " " * 10_000,
    "collects": "{% set n = namespace(all=[]) %}{% for m in messages %}{% set n.all = n.all + [m.content] %}"
    "{% endfor %}{{ n.all|join(', ') }}",
    "looks at each character": "{% for m in messages %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ raise_exception('an image') }}{% endif %}{% endfor %}{% endfor %}x",
    "tells the time": "{{ 1700000000 }}{% if messages|length < 1700000000 %}x{% endif %}",
}
"""What templates of well-known models do."""


@pytest.mark.parametrize("template", HONEST.values(), ids=HONEST)
def test_a_chat_of_hundreds_of_messages_is_no_bomb(folder: Path, template: str) -> None:
    """Their sums grew with the square of the messages: chats of 500 turns were refused."""
    (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": ("user", "assistant")[i % 2], "content": "ab " * 300} for i in range(400)]
    assert load_tokenizer(folder).encode_chats([messages])


def test_an_error_of_a_template_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    with pytest.raises(ConfigError, match="fails on these messages: division by zero"):
        load_tokenizer(folder).encode("a")
