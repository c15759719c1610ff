"""`exlm chat`: a conversation on the terminal. Answers go to standard output, the rest to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import exlm
from exlm import ExlmError, InputError, env

from .conversation import Conversation, check_setting_name
from .input import MessageReader, SigintHandler, check_utf8
from .model_options import MODEL_HELP, CpuActivationBits, Device, Dtype
from .model_session import ModelSession, Temperature, TopP

if TYPE_CHECKING:
    import torch

GREETING = "/help lists the commands. Ctrl-C stops an answer; twice at the prompt, it leaves."
MULTILINE_HELP = 'A \\ at the end of a line continues the message; one that begins with """ goes on until """.'
CONTEXT = 4096
MAX_ANSWER_FRACTION = 1 / 4
"""The part of the context that is reserved for the answer, unless --max-new-tokens is less."""

Model = Annotated[str | None, typer.Argument(help=MODEL_HELP)]
System = Annotated[str | None, typer.Option(help="A system message.")]
Template = Annotated[
    str | None,
    typer.Option(help="The name of a chat template of the model, or of a prompt format (llama3, chatml, …)."),
]
MaxNewTokens = Annotated[int, typer.Option("-n", "--max-new-tokens", help="Longest answer, in tokens.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampler: the same seed gives the same conversation.")]
Context = Annotated[
    int | None, typer.Option(help=f"Context length in tokens; default {CONTEXT}, or the model's if that is shorter.")
]
Stats = Annotated[bool, typer.Option("--stats", help="Show the speed after each answer.")]
NoHistory = Annotated[bool, typer.Option("--no-history", help="Do not keep a history of typed messages.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress and no greeting.")]


def chat(
    model: Model = None,
    system: System = None,
    template: Template = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = None,
    context: Context = None,
    device: Device = None,
    dtype: Dtype = None,
    cpu_activation_bits: CpuActivationBits = 16,
    stats: Stats = False,
    no_history: NoHistory = False,
    quiet: Quiet = False,
) -> None:
    """Chat with a model. Earlier turns stay in the KV cache, so each turn only costs its own tokens.

    Example: exlm chat ./llama.gguf --system "Answer in one sentence."
    """
    length = CONTEXT if context is None else context
    if max_new_tokens < 1 or length < 1 or not temperature >= 0:
        raise InputError("--max-new-tokens and --context must be at least 1, the temperature at least 0.")
    settings = exlm.Settings(temperature=temperature, top_k=0, top_p=top_p, token_repetition_penalty=1.0)
    settings.check()
    session = ModelSession.open(
        model, max_seq_len=None, device=device, dtype=dtype, cpu_activation_bits=cpu_activation_bits, quiet=quiet
    )
    _choose_template(session, template)
    if system is None and session.chat_format is not None:
        system = session.chat_format.default_system
    session.load(1, length - 1)
    history = None if no_history else env.cache_folder() / "chat-history.jsonl"
    conversation = Conversation(settings, max_new_tokens, seed, system)
    Chat(session, conversation, MessageReader(history), stats=stats, quiet=quiet).run(context)


class Chat:
    """Runs a conversation: reads messages and commands, streams answers."""

    def __init__(
        self, session: ModelSession, conversation: Conversation, reader: MessageReader, *, stats: bool, quiet: bool
    ) -> None:
        self.session, self.conversation, self.reader = session, conversation, reader
        self.stats, self.quiet = stats, quiet
        self.console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self.sigint = SigintHandler()
        self.leaving = False
        self.commands: Mapping[str, tuple[Callable[[str], None], str]] = {
            "help": (self._help, "shows this list"),
            "system": (self._system, "TEXT changes the system message, off removes it; alone it shows it"),
            "set": (self._set, "NAME VALUE changes a setting; without a value it shows it, alone all"),
            "retry": (self._retry, "answers the last message once more"),
            "undo": (self._undo, "takes the last message and its answer back"),
            "clear": (self._clear, "starts afresh; the system message and the settings stay"),
            "save": (self._save, "FILE writes the conversation and its settings to a file"),
            "load": (self._load, "FILE goes on with a conversation that was saved"),
            "quit": (self._quit, "leaves, as does the end of input"),
        }

    def run(self, requested_context: int | None = None) -> None:
        """Run until the user leaves; `requested_context` is the value of --context."""
        if not self.quiet:
            self._note(GREETING)
        if (requested_context or 0) > self.session.max_tokens:
            self._note(
                f"(--context {requested_context} is more than this model has: {self.session.max_tokens} tokens.)"
            )
        with self.sigint.installed():
            while not self.leaving and (text := self._read_message()) is not None:
                try:
                    self._handle(text)
                except ExlmError as error:
                    self.console.print(str(error), style="red")

    def _read_message(self) -> str | None:
        """The next message; None at the end of input and after Ctrl-C twice in a row."""
        for note in ("\n(Ctrl-C once more leaves)", ""):
            try:
                with self.sigint.typing():
                    return self.reader.read()
            except KeyboardInterrupt:
                self._note(note)
        return None

    def _handle(self, text: str) -> None:
        """Run a command (/name), or answer a message; // begins a message that starts with a slash."""
        if not text.startswith("/") or text.startswith("//"):
            self.conversation.add_user_message(check_utf8(text).removeprefix("/"))
            try:
                self._answer()
            except ExlmError:
                self.conversation.undo()
                raise
            return
        name, _, rest = text[1:].partition(" ")
        if name not in self.commands:
            raise InputError(f"There is no command /{name}; /help lists those there are.")
        self.commands[name][0](rest.strip())

    def _answer(self) -> None:
        """Stream the model's answer to the last message."""
        answer, conversation = "", self.conversation
        pieces = self.session.stream(
            self._encode_prompt(),
            conversation.max_new_tokens,
            conversation.settings,
            conversation.next_seed,
            lambda: self.sigint.stop_requested,
        )
        for piece in pieces:
            answer += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        conversation.add_answer(answer)
        if self.sigint.take_request():
            self._note("(stopped)")
        if self.stats:
            self._note(self.session.stats)

    def _encode_prompt(self) -> torch.Tensor:
        """The prompt's tokens; the oldest turns are dropped until an answer fits into the context as well."""
        limit, dropped_before = self.session.max_tokens, self.conversation.dropped
        reserved = min(self.conversation.max_new_tokens, int(limit * MAX_ANSWER_FRACTION))
        while True:
            ids = self.session.encode_chat(self.conversation.messages)
            only_last_turn = self.conversation.dropped == len(self.conversation.turns) - 1
            if ids.shape[1] + reserved <= limit or only_last_turn:
                break
            self.conversation.dropped += 1
        if ids.shape[1] >= limit:
            raise InputError(f"That makes {ids.shape[1]} tokens, and the context has {limit}: say less.")
        if newly_dropped := self.conversation.dropped - dropped_before:
            turns = "oldest turn is" if newly_dropped == 1 else f"{newly_dropped} oldest turns are"
            self._note(f"(The context of {limit} tokens is full: the {turns} left out from here on.)")
        return ids

    def _help(self, _: str) -> None:
        for name, (_method, meaning) in self.commands.items():
            self.console.print(f"/{name} {meaning}")
        self.console.print(MULTILINE_HELP)

    def _system(self, text: str) -> None:
        if text:
            self.conversation.set_system(None if text == "off" else check_utf8(text))
        else:
            self.console.print(self.conversation.system or "There is no system message.")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if value:
            self.conversation.set(name, value.strip(), self.session.tokenizer)
            return
        if name and name not in self.conversation.values:
            check_setting_name(name)
        for one in [name] if name else self.conversation.values:
            self.console.print(f"{one} {self.conversation.values[one]}".lower())

    def _retry(self, _: str) -> None:
        before = self.conversation.retry()
        try:
            self._answer()
        except ExlmError:
            self.conversation.turns[-1].assistant = before
            raise

    def _undo(self, _: str) -> None:
        self.conversation.undo()

    def _clear(self, _: str) -> None:
        self.conversation.clear()

    def _save(self, text: str) -> None:
        self.conversation.save(_path("/save", text))

    def _load(self, text: str) -> None:
        self.conversation = self.conversation.load(_path("/load", text), self.session.tokenizer)
        count = len(self.conversation.turns)
        self._note(f"({count} turn{'' if count == 1 else 's'})")

    def _quit(self, _: str) -> None:
        self.leaving = True

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim")


def _choose_template(session: ModelSession, template: str | None) -> None:
    """Select the template of this name, or make sure that the model has one of its own."""
    names = session.tokenizer.chat_templates.names
    listed = f"there are: {', '.join(names)}."
    if template is not None and template not in names:
        raise InputError(f"No chat template is called {template!r}; {listed}")
    if template is None and not session.tokenizer.has_chat_template:
        raise InputError(
            f"This model has no chat template: give --template ({listed[:-1]}), or use `exlm generate --raw`."
        )
    session.template = template


def _path(command: str, text: str) -> Path:
    if not text:
        raise InputError(f"{command} needs the name of a file.")
    return Path(os.path.expanduser(text))  # Path.expanduser raises for unknown users
