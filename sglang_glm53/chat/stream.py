"""Tool calls out of a growing text: one reader for whole answers and for streams.

The grammar is GLM's, `name` being a tool of the request:

    <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>

What is read depends on the text alone and never on how it was cut: a decision is made when the text
settles it, and until then the characters are held back. The rules, where models leave the grammar:

- `<tool_call>` opens a call when a tool's name and then `<arg_key>` or `</tool_call>` follow, white
  space allowed; otherwise it is text.
- Everything between `<arg_value>` and the next `</arg_value>` is the value, other tags included.
- A call to a tool that the request does not have is text, to its end.
- Text between arguments is text of the answer, so is a key without a value; the call goes on.
- A key without its `<arg_key>` is one if the tool has such a parameter.
- `<tool_call>` between arguments ends a call that was not ended; so does the end of the text.
- An argument whose value the text's end cuts off is no argument. What a client has of it in a
  stream is taken back (the key comes again, with null: of two equal keys JSON readers take the
  last), for half a command is worse than none.
"""

from __future__ import annotations

from sglang_glm53.chat import tags
from sglang_glm53.chat.events import (
    Arguments,
    CallEnd,
    CallStart,
    Event,
    Layout,
    Tools,
)
from sglang_glm53.chat.names import LONGEST_KEY, Names
from sglang_glm53.chat.values import escaped, to_json


class CallReader(tags.Growing):
    """Reads tool calls out of pieces of one answer; see the module for the rules."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._names = Names(tools)
        self._events: list[Event] = []
        self._state = self._in_text
        # States that look for a tag behind white space.
        self._waiting = (self._in_header, self._between, self._after_key)
        self._layout = Layout()
        self._name = ""
        self._is_call = False  # False: the open call is to an unknown tool, and is text
        self._count = 0  # arguments given of the open call
        self._pairs: list[tuple[str, str]] = []  # arguments kept until the call ends
        self._key = ""
        self._written = ""  # the open argument as the model wrote it
        self._space = 0  # of the buffer behind a key, white space at its start
        self._value: list[str] = []  # pieces of the open value that have left the buffer
        self._streams = False  # the open value is passed on while it grows

    def feed(self, text: str) -> list[Event]:
        """What another piece of the answer settles, in order."""
        for piece in tags.slices(text):
            settles = not (self._state in self._waiting and tags.adds_space(self._buffer, piece))
            self._lengthen(piece)
            while settles and self._buffer and self._state():
                pass
        return self._taken()

    def finish(self) -> list[Event]:
        """What is left, at the end of the answer."""
        if self._state == self._in_text or self._state == self._in_header:
            self._say(self._buffer)
        elif self._state == self._in_value:
            self._cut_off()
        elif self._is_call:
            if self._state == self._between and self._buffer.isspace():
                self._buffer = ""  # layout before an end that did not come
            self._say(self._written + self._buffer)
            self._end_call()
        else:
            self._say(self._buffer)
        self._buffer = self._written = ""
        self._value = []
        self._state = self._in_text
        self._events.extend(self._layout.finish())
        return self._taken()

    # --- states: each returns whether to go on with what is left of the buffer -----------------

    def _in_text(self) -> bool:
        start = self._buffer.find(tags.CALL)
        if start < 0:
            self._say(self._take(len(self._buffer) - tags.begun(self._buffer, (tags.CALL,))))
            return False
        self._say(self._take(start))
        self._state = self._in_header
        return True

    def _in_header(self) -> bool:
        """The buffer begins with `<tool_call>`."""
        header = self._names.header(self._buffer[len(tags.CALL) :])
        if header is None:
            return False
        if isinstance(header, bool):
            self._say(self._take(len(tags.CALL)))
            self._state = self._in_text
            return True
        self._name, head = header
        self._is_call = self._tools.is_known(self._name)
        self._count, self._pairs = 0, []
        self._drop(len(tags.CALL) + len(head))
        if self._is_call:
            self._layout.call()
            self._events.append(CallStart(self._name))
        self._state = self._between
        return True

    def _between(self) -> bool:
        """In a call, where an argument or the call's end is expected."""
        start = tags.after_space(self._buffer)
        rest = self._buffer[start:]
        if not rest or tags.may_become(rest, (tags.KEY, tags.CALL_END, tags.CALL)):
            return False
        if rest.startswith(tags.KEY):
            self._drop(start)
            self._written = self._begin_argument(len(tags.KEY))
            self._state = self._in_key
        elif rest.startswith(tags.CALL_END):
            self._drop(start + len(tags.CALL_END))
            self._end_call()
            self._state = self._in_text
        elif rest.startswith(tags.CALL):
            self._drop(start)
            self._end_call()
            self._state = self._in_header
        else:
            bare = self._is_call and self._names.bare_key(self._name, rest)
            if bare is None:
                return False
            if bare:
                self._drop(start)
                self._written = ""
                self._state = self._in_key
            else:
                self._state = self._astray
        return True

    def _astray(self) -> bool:
        """In a call, in text that belongs to no argument."""
        stops = (tags.KEY, tags.CALL_END, tags.CALL)
        found = [at for tag in stops if (at := self._buffer.find(tag)) >= 0]
        if found:
            self._say(self._take(min(found)))
            self._state = self._between
            return True
        self._say(self._take(len(self._buffer) - tags.begun(self._buffer, stops)))
        return False

    def _in_key(self) -> bool:
        tag = tags.first(self._buffer)
        length = tag.start() if tag else len(self._buffer) - tags.begun(self._buffer)
        if length <= LONGEST_KEY and tag is None:
            return False
        if length > LONGEST_KEY or tag is None or tag.group() not in (tags.KEY_END, tags.VALUE):
            self._state = self._astray
            return self._say_written()
        self._key = self._buffer[:length].strip()
        # An <arg_value> where </arg_key> should stand: the key ends all the same.
        taken = length + (len(tags.KEY_END) if tag.group() == tags.KEY_END else 0)
        self._written += self._begin_argument(taken)
        self._space = 0
        self._state = self._after_key
        return True

    def _after_key(self) -> bool:
        self._space = start = tags.after_space(self._buffer, self._space, written=True)
        rest = self._buffer[start:]
        if not rest or rest == "\\" or tags.may_become(rest, (tags.VALUE,)):
            return False
        if not rest.startswith(tags.VALUE):
            self._state = self._between
            return self._say_written()
        self._written += self._begin_argument(start + len(tags.VALUE))
        self._streams = (
            self._is_call
            and not self._tools.waits(self._name)
            and self._tools.is_text(self._name, self._key)
        )
        if self._streams:
            self._give(self._opening() + '"')
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        end = self._buffer.find(tags.VALUE_END)
        whole = end >= 0
        if not whole:
            end = len(self._buffer) - tags.begun(self._buffer, (tags.VALUE_END,))
        piece = self._take(end)
        self._value.append(piece)
        if self._streams:
            self._give(escaped(piece) + ('"' if whole else ""))
        if not whole:
            return False
        value, self._value = "".join(self._value), []
        if not self._is_call:
            self._say(value)
        elif self._tools.waits(self._name):
            self._pairs.append((self._key, value))
        elif not self._streams:
            read = self._tools.read(self._name, [(self._key, value)])
            self._give(self._opening() + to_json(read[self._key], value))
        self._drop(len(tags.VALUE_END))
        self._count += 1
        self._written = ""
        self._state = self._between
        return True

    # --- effects --------------------------------------------------------------------------------

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take(self, length: int) -> str:
        piece, self._buffer = self._buffer[:length], self._buffer[length:]
        return piece

    def _say(self, text: str) -> None:
        if text:
            self._events.extend(self._layout.text(text))

    def _drop(self, length: int) -> None:
        """Take characters that are not text, except in a call that is."""
        piece = self._take(length)
        if not self._is_call:
            self._say(piece)

    def _begin_argument(self, length: int) -> str:
        """Take characters of an argument before its value; they are kept, for they may be text."""
        piece = self._take(length)
        if self._is_call:
            return piece
        self._say(piece)
        return ""

    def _say_written(self) -> bool:
        self._say(self._written)
        self._written = ""
        return True

    def _give(self, json: str) -> None:
        if json:
            self._events.append(Arguments(json))

    def _opening(self) -> str:
        return ("{" if self._count == 0 else ", ") + to_json(self._key, self._key) + ": "

    def _cut_off(self) -> None:
        """The answer ends in a value: the argument is none, and its text is the answer's."""
        if self._streams:
            self._give('", ' + to_json(self._key, self._key) + ": null")
            self._count += 1
        self._say(self._written + "".join(self._value) + self._buffer)
        self._end_call()

    def _end_call(self) -> None:
        if not self._is_call:
            return
        if self._pairs:
            written = dict(self._pairs)
            read = self._tools.read(self._name, self._pairs).items()
            fields = (f"{to_json(key, key)}: {to_json(value, written[key])}" for key, value in read)
            self._give("{" + ", ".join(fields) + "}")
        else:
            self._give("{}" if self._count == 0 else "}")
        self._events.append(CallEnd())
        self._is_call = False
