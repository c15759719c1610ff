"""`exlm chat` with messages and commands on standard input."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from exlm import Config, InputError, Model, Settings, Tokenizer
from exlm.cli import input as terminal_input
from exlm.cli.__main__ import app
from exlm.cli.conversation import VALUE_WORDS, Conversation, setting_types
from exlm.cli.model_session import ModelSession
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(Config(folder))


@pytest.fixture(autouse=True)
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the model was given, as text."""
    recorded: list[str] = []
    original = ModelSession.stream

    def stream(self: ModelSession, ids: torch.Tensor, *rest: Any, **more: Any) -> Iterator[str]:
        recorded.append(str(self.tokenizer.decode(ids[0], decode_special_tokens=True)))
        return original(self, ids, *rest, **more)

    monkeypatch.setattr(ModelSession, "stream", stream)
    return recorded


@pytest.fixture
def chat(folder: Path) -> Callable[..., tuple[list[str], str]]:
    """Run a chat with these input lines; returns the answers, and the text on standard error."""

    def run(*lines: str, options: tuple[str, ...] = ("-t", "0", "-n", "4")) -> tuple[list[str], str]:
        command = ["chat", str(folder), "-q", *options]
        done = CliRunner(env={"COLUMNS": "160"}).invoke(app, command, input="".join(f"{x}\n" for x in lines))
        if done.exception is not None:
            raise done.exception
        return done.stdout.split("\n")[:-1], done.stderr

    return run


def greedy(folder: Path, prompt: str, count: int) -> str:
    """The oracle: the same answer without a cache, one full forward pass for each token."""
    model, tokenizer = Model(Config(folder)), Tokenizer(Config(folder))
    model.load()
    ids = tokenizer.encode(prompt, encode_special_tokens=True)
    out: list[int] = []
    while len(out) < count:
        so_far = torch.cat((ids, torch.tensor([out], dtype=torch.long)), 1)
        out.append(int(model.forward(so_far)[0, -1].argmax()))
    return str(tokenizer.decode(torch.tensor(out)))


def test_prompt_has_all_earlier_turns(folder: Path, chat: Any, prompts: list[str]) -> None:
    answers, stderr = chat("Hi", "", "Why?", options=("-t", "0", "-n", "3", "--system", "Be brief."))
    first = "<s>system: Be brief.\n<s>user: Hi\nassistant:"
    assert prompts[0] == first
    answer = greedy(folder, first, 3)
    assert prompts[1] == f"<s>system: Be brief.\n<s>user: Hi\n<s>assistant: {answer}\n<s>user: Why?\nassistant:"
    assert "\n".join(answers).startswith(answer)
    assert stderr == ""


def test_multiline_messages(chat: Any, prompts: list[str]) -> None:
    chat("one\\", "two\\", "three", '"""a', "", '/quit"""', '  """b"""', "c\\")
    messages = [re.findall(r"user: (.*?)\n(?=assistant:|<s>)", prompt, re.DOTALL)[-1] for prompt in prompts]
    assert messages == ["one\ntwo\nthree", "a\n\n/quit", "b", "c"]


def test_commands_change_the_prompt(chat: Any, prompts: list[str]) -> None:
    chat(
        "A",
        "/undo",
        "B",
        "/system Hush.",
        "/system",
        "/retry",
        "/clear",
        "C",
        "/system off",
        "D",
        "//x",
        "/quit",
        "E",
    )
    without_answers = [re.sub(r"(?<=assistant:)[^<]+\n", "", prompt) for prompt in prompts]
    assert len(prompts) == 6
    assert prompts[1] == "<s>user: B\nassistant:"
    assert prompts[2] == "<s>system: Hush.\n<s>user: B\nassistant:"
    assert prompts[3] == "<s>system: Hush.\n<s>user: C\nassistant:"
    assert without_answers[4].startswith("<s>user: C\n")
    assert "system" not in without_answers[4]
    assert prompts[5].endswith("<s>user: /x\nassistant:")


def test_output_of_commands(chat: Any) -> None:
    _, stderr = chat("/system", "/help", "/nonsense", "/retry", "/undo", "/save", "/set temprature 1")
    for message in (
        "There is no system message.",
        "/retry answers the last message once more",
        'until """',
        "There is no command /nonsense; /help lists",
        "/save needs the name of a file",
        "There is no setting 'temprature'. Did you mean temperature?",
    ):
        assert message in stderr
    assert stderr.count("Nothing was said yet.") == 2


def test_set_lists_shows_and_changes_settings(chat: Any) -> None:
    _, stderr = chat("/set")
    listed = dict(line.split(" ", 1) for line in stderr.splitlines())
    assert list(listed) == ["max_new_tokens", "seed", *setting_types()]
    assert (listed["temperature"], listed["top_p"], listed["mirostat"]) == ("0.0", "0.95", "false")
    _, stderr = chat(
        "/set temperature 0.25",
        "/set temperature",
        "/set mirostat on",
        "/set mirostat",
        "/set seed 5",
        "/set seed",
    )
    assert stderr.splitlines() == ["temperature 0.25", "mirostat true", "seed 5"]


def test_every_setting_with_a_textual_value_can_be_set(tokenizer: Tokenizer) -> None:
    """The settings that a chat cannot change are listed here."""
    excluded = {field.name for field in dataclasses.fields(Settings)} - set(setting_types())
    assert excluded == {
        "mirostat_mu", "token_bias", "cfg_scale", "post_sampling_hooks", "ngram_trie", "ngram_index",
        "ngram_history", "filters", "filter_prefer_eos",
    }  # fmt: skip
    conversation = Conversation(Settings())
    for name in setting_types():
        kind = setting_types()[name]
        text, expected = {bool: ("on", True), int: ("1", 1), float: ("0.5", 0.5)}.get(kind, ('["a", 7]', None))
        conversation.set(name, text, tokenizer)
        if kind in VALUE_WORDS:
            assert getattr(conversation.settings, name) == expected
        else:
            assert getattr(conversation.settings, name) == {tokenizer.single_id("a"), 7}
    conversation.settings.check()
    conversation.set("dry_sequence_breakers", "none", tokenizer)
    assert conversation.settings.dry_sequence_breakers is None


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("temperature", "warm", "temperature takes a number, found 'warm'"),
        ("temperature", "nan", "temperature"),
        ("top_k", "1.5", "top_k takes a whole number"),
        ("mirostat", "maybe", "mirostat takes true or false"),
        ("xtc_probability", "2", "xtc_probability"),
        ("token_repetition_penalty", "0", "token_repetition_penalty"),
        ("dry_sequence_breakers", "newline", "a list such as"),
        ("dry_sequence_breakers", '["no single token"]', "is not one token"),
        ("dry_sequence_breakers", "[99999]", "no token 99999"),
        ("dry_sequence_breakers", "[true]", "is not one token"),
        ("token_bias", "1", "is for programs"),
        ("cfg_scale", "1", "is for programs"),
        ("max_new_tokens", "0", "at least 1"),
        ("max_new_tokens", "many", "takes a whole number"),
        ("seed", "-1", "at least 0"),
        ("nonsense", "1", "There is no setting 'nonsense'."),
    ],
)
def test_invalid_settings_are_refused_and_change_nothing(
    tokenizer: Tokenizer, name: str, text: str, complaint: str
) -> None:
    conversation = Conversation(Settings())
    before = conversation.values
    with pytest.raises(InputError, match=re.escape(complaint)):
        conversation.set(name, text, tokenizer)
    assert conversation.values == before


def test_retry_gives_another_answer_and_a_seed_reproduces_the_chat(chat: Any, tmp_path: Path) -> None:
    options = ("-t", "2", "-n", "12", "--seed", "3", "--top-p", "1")
    texts = []
    for _ in range(2):
        chat("Hi", f"/save {tmp_path}/a", "/retry", f"/save {tmp_path}/b", options=options)
        texts.append([json.loads((tmp_path / name).read_text())["messages"] for name in "ab"])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert texts[0][0][0] == texts[0][1][0] == {"role": "user", "content": "Hi"}


def test_save_and_load(chat: Any, prompts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    chat(
        "A",
        "B",
        "/system S",
        "/set top_k 7",
        '/set dry_sequence_breakers ["a"]',
        f"/save {path}",
        f"/save {path}",
    )
    _, stderr = chat(f"/load {path}", "/set top_k", "/set dry_sequence_breakers", "C")
    assert stderr.splitlines()[:2] == ["(2 turns)", "top_k 7"]
    saved = json.loads(path.read_text())["messages"]
    assert [one["role"] for one in saved] == ["system", "user", "assistant", "user", "assistant"]
    expected = "".join(f"<s>{one['role']}: {one['content']}\n" for one in saved)
    assert prompts[-1] == expected + "<s>user: C\nassistant:"
    assert [one.name for one in tmp_path.iterdir()] == ["talk.json"]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.text(max_size=5)),
        st.tuples(st.just("instruct"), st.none() | st.text(max_size=5)),
        st.tuples(st.sampled_from(["answer", "retry", "undo", "clear", "forget", "save"]), st.just("x")),
    ),
    max_size=20,
)


@given(OPERATIONS)
@settings(max_examples=100)
def test_random_commands_keep_the_conversation_consistent(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, operations: list[tuple[str, Any]]
) -> None:
    """The oracle is a list of (message, answer) pairs."""
    conversation, pairs, system = Conversation(Settings(top_k=3)), [], None
    path = tmp_path_factory.getbasetemp() / "walk.json"
    for name, text in operations:
        if name == "ask":
            conversation.add_user_message(text)
            pairs.append([text])
        elif name == "instruct":
            conversation.set_system(text)
            system = text
        elif name == "forget" and conversation.dropped < len(conversation.turns) - 1:
            conversation.dropped += 1
        elif name == "answer" and pairs and len(pairs[-1]) == 1:
            conversation.add_answer("y")
            pairs[-1].append("y")
        elif name in ("retry", "undo") and pairs:
            getattr(conversation, name)()
            pairs[-1:] = [pairs[-1][:1]] if name == "retry" else []
        elif name == "clear":
            conversation.clear()
            pairs = []
        elif name == "save" and all(len(pair) == 2 for pair in pairs[:-1]):
            path.unlink(missing_ok=True)
            conversation.save(path)
            conversation = Conversation(Settings()).load(path, tokenizer)
        assert 0 <= conversation.dropped <= max(0, len(conversation.turns) - 1)
        assert conversation.settings.top_k == 3
        expected = [text for pair in pairs[conversation.dropped :] for text in pair]
        assert [one["content"] for one in conversation.messages] == ([] if system is None else [system]) + expected


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("My diary", "is not a saved chat"),
        ("[" * 100_000, "is not a saved chat"),
        ('{"messages": []}', "is not a saved chat"),
        ('{"format": "exlm chat 1", "messages": [{"role": "user"}]}', "is not a saved chat"),
        ('{"format": "exlm chat 1", "messages": [], "settings": []}', "is not a saved chat"),
        ('{"format": "exlm chat 1", "messages": [{"role": "assistant", "content": ""}]}', "take turns"),
        ('{"format": "exlm chat 1", "messages": [], "settings": {"top_k": "x"}}', "top_k"),
        ('{"format": "exlm chat 1", "messages": [], "settings": {"shell": 1}}', "no setting 'shell'"),
    ],
)
def test_save_and_load_refuse_other_files(
    chat: Any, prompts: list[str], tmp_path: Path, content: str, complaint: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    _, stderr = chat("A", f"/load {path}", "B")
    assert complaint in stderr
    assert "<s>user: A" in prompts[1]
    if complaint == "is not a saved chat":
        _, stderr = chat(f"/save {path}")
        assert complaint in stderr
        assert path.read_text() == content
    _, stderr = chat("/load /no/where", "/save /no/where")
    assert "/no/where cannot be read: No such file" in stderr
    assert "/no/where cannot be written: No such file" in stderr


def test_oldest_turns_are_dropped_when_the_context_is_full(chat: Any, prompts: list[str]) -> None:
    options = ("-t", "0", "-n", "20", "--context", "256", "--system", "Stay.")
    _, stderr = chat("a" * 60, "b" * 60, "c" * 60, "d" * 150, options=options)
    assert all(prompt.startswith("<s>system: Stay.\n<s>user: ") for prompt in prompts)
    assert ["a" * 60 in prompt for prompt in prompts] == [True, True, False, False]
    assert "b" * 60 in prompts[2]
    assert "c" * 60 not in prompts[3]
    assert "The context of 256 tokens is full: the oldest turn is left out" in stderr
    assert "the 2 oldest turns are left out" in stderr


def test_a_message_longer_than_the_context_is_refused_and_removed(chat: Any, prompts: list[str]) -> None:
    _, stderr = chat("x" * 300, "Hi", "/set max_new_tokens 9", options=("-t", "0", "-n", "3", "--context", "256"))
    assert "and the context has 256: say less" in stderr
    assert prompts == ["<s>user: Hi\nassistant:"]


def test_a_retry_that_fails_keeps_the_answer(chat: Any, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    _, stderr = chat("Hi", "/system " + "x" * 300, "/retry", f"/save {path}", options=("-n", "3", "--context", "256"))
    assert "say less" in stderr
    assert [one["role"] for one in json.loads(path.read_text())["messages"]] == [
        "system",
        "user",
        "assistant",
    ]


def test_stats_option(chat: Any) -> None:
    assert "tokens/s" not in chat("Hi")[1]
    assert "of it cached" in chat("Hi", options=("-n", "2", "--stats"))[1]


def test_prompt_formats_by_name(chat: Any, prompts: list[str], folder: Path, tokenizer: Tokenizer) -> None:
    chat("Hi", options=("-n", "2", "--template", "llama", "--system", "S"))
    assert prompts[-1] == "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nHi [/INST]"
    chat("Hi", options=("-n", "2", "--template", "raw"))
    assert prompts[-1].startswith("<s>This is a conversation between a helpful AI assistant and a user.\nUser: ")
    chat("Hi", options=("-n", "2", "--template", "phi3"))
    assert prompts[-1] == "<s><|user|>\nHi<|end|>\n<|assistant|>\n"
    _, stderr = chat("Hi", options=("-n", "2", "--template", "gemma", "--system", "S"))
    assert "no place for a system message" in stderr
    with pytest.raises(InputError, match="No chat template is called 'lama'; there are: default, raw, llama"):
        chat("Hi", options=("--template", "lama"))


def test_stop_tokens_of_a_prompt_format_end_answers(folder: Path) -> None:
    session = ModelSession.open(str(folder), max_seq_len=None, device=None, dtype=None, quiet=True)
    assert session.stop_conditions == [2]
    session.template = "zephyr"
    assert session.stop_conditions == [2, "<|user|>", "</s>"]
    session.template = "llama3"
    assert session.stop_conditions == [2, "<|eot_id|>", "<|start_header_id|>"]
    ids = session.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0, 0] == 1


def test_a_model_without_a_template_needs_a_format(tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "plain")
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    del tokenizer_config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    command = ["chat", str(folder), "-q", "-n", "2"]
    done = CliRunner().invoke(app, command, input="Hi\n")
    assert isinstance(done.exception, InputError)
    assert "give --template (there are: raw, llama" in str(done.exception)
    assert CliRunner().invoke(app, [*command, "--template", "chatml"], input="Hi\n").exit_code == 0


def test_invalid_options(folder: Path) -> None:
    for options in (["-n", "0"], ["--context", "0"], ["-t", "-1"], ["--top-p", "nan"]):
        done = CliRunner().invoke(app, ["chat", str(folder), *options])
        assert isinstance(done.exception, InputError)


def test_a_damaged_or_unwritable_history_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b'"one"\nnonsense\n[1]\n\xff\n"two\\nlines"\n')
    assert terminal_input._read_history(path) == ["one", "two\nlines"]
    assert terminal_input._read_history(tmp_path / "none") == []
    terminal_input._append_history(tmp_path / "folder" / "history", "text")
    assert terminal_input._read_history(tmp_path / "folder" / "history") == ["text"]
    terminal_input._append_history(tmp_path, "a folder is not a file")
    assert terminal_input.MessageReader(path).interactive is False
