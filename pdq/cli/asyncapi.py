"""The AsyncAPI 3.0 document: every subject of ``pdq.core.names`` with the messages that travel on it.

Addresses are made by calling the functions of ``names`` with ``{placeholders}``; nothing is spelled a second time.
Written from the point of view of a program outside pdq: it *receives* what pdq accepts, and *sends* what pdq emits.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

from pdq.cli.docstrings import prose
from pdq.core import names
from pdq.ports import Queue

_TOKEN_RULE: Final = """\
The model's name as one subject token. Take its UTF-8 bytes; ASCII letters, digits, `-` and `_` stay, every other byte
becomes `=` and two upper-case hex digits. `org/model.v1` is `org=2Fmodel=2Ev1`, `SmolLM2-135M-Instruct` stays as it is.
"""

_INFO: Final = """\
How a program asks pdq for a completion without going through HTTP.

1. Subscribe to a subject of your own (an inbox will do): the job's `reply_to`.
2. Publish a `PrefillJob` to JetStream on `pdq.jobs.prefill.<model>.<priority>`. The broker's acknowledgement means that
the job is stored, and where: keep `stream` and `seq`. A `Nats-Msg-Id` header makes a repeated publish within the
duplicate window a no-op.
3. Read `TokenFrame` messages. Every entry names its request, and `seq` is the position of its first token: drop what you
have.
4. An entry with `end` is the last one: exactly one comes for every accepted request, also for one that cannot be parsed
as long as its `reply_to` can be read.
5. Frames travel at most once. If you miss something (`seq` is beyond what you have), or hear nothing for some seconds,
send a `StatusQuestion` to `pdq.status` (a NATS request). The `StatusAnswer` says what has become of the job, and what
you lack comes to `reply_to` again, the end included. No answer: ask again. `unknown`: it was turned away, its time
in the queue ran out, or it has ended long ago; publish it again if you still want it. What you publish again under the
same `Nats-Msg-Id` must have the same `reply_to`.

If a decode worker dies in the middle of a stream, the next one asks the owner of `reply_to` which tokens it has (a NATS
request, `OutputQuestion`) and goes on from there. Answer with `OutputAnswer`; `wanted: false` or no answer within the
time limit cancels the request, as nobody seems to be there any more. A reaper asks the same about a request that has
been queued for long; without an answer it ends one of which no queue has a job.

Unknown fields are ignored by every reader; fields are added, never changed.
"""

_WORK_QUEUES: Final[dict[str, dict[str, Any]]] = {
    "prefillJobs": {
        "stream": names.PREFILL_STREAM,
        "address": names.prefill_subject,
        "message": "PrefillJob",
        "about": "Requests that wait for a prefill worker.",
    },
    "decodeJobs": {
        "stream": names.DECODE_STREAM,
        "address": names.decode_subject,
        "message": "DecodeJob",
        "about": "Requests whose KV is, or will be, offered. Published by pdq's own prefill workers only.",
    },
    "localJobs": {
        "stream": names.LOCAL_STREAM,
        "address": names.local_subject,
        "message": "PrefillJob",
        "about": "Requests that one worker shall prefill and decode.",
    },
}


def document() -> dict[str, Any]:
    """The whole document as plain data."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "pdq",
            "version": version("pdq"),
            "description": _INFO,
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "nats": {
                "host": "{host}",
                "protocol": "nats",
                "description": "NATS with JetStream, the one at `PDQ_NATS_URL`.",
                "variables": {"host": {"default": "127.0.0.1:4222"}},
            }
        },
        "channels": {
            **{name: _queue_channel(**queue) for name, queue in _WORK_QUEUES.items()},
            "deadLetters": {
                "address": _placeholders(names.dead_subject("QUEUE", "MODEL")),
                "description": "Jobs that can never be done, as they came; the headers say why.",
                "parameters": {"queue": {"enum": [queue.value for queue in Queue]}, "model": _parameter("model")},
                "messages": {"DeadJob": _ref("components", "messages", "DeadJob")},
                "x-jetstream": {
                    "stream": names.DEAD_STREAM,
                    "subjects": [names.DEAD_SUBJECTS],
                    "retention": "limits",
                },
            },
            "tokens": {
                "address": "{reply_to}",
                "description": "What the workers send to whoever asked: token frames, and the question on resume.",
                "parameters": {
                    "reply_to": {
                        "description": "The `reply_to` of the job. pdq's own programs use "
                        f"`{names.reply_subject('<process>')}`."
                    }
                },
                "messages": {
                    "TokenFrame": _ref("components", "messages", "TokenFrame"),
                    "OutputQuestion": _ref("components", "messages", "OutputQuestion"),
                },
            },
            "answers": {
                "address": None,
                "description": "The inbox that a NATS request carries: where its answer goes.",
                "messages": {
                    "OutputAnswer": _ref("components", "messages", "OutputAnswer"),
                    "AccountAnswer": _ref("components", "messages", "AccountAnswer"),
                    "StatusAnswer": _ref("components", "messages", "StatusAnswer"),
                },
            },
            "worker": {
                "address": _placeholders(names.worker_subject("WORKER")),
                "description": "Control messages to one worker.",
                "parameters": {"worker": {"description": "The worker's id, as in `TokenFrame.worker`."}},
                "messages": {"Control": _ref("components", "messages", "Control")},
            },
            "account": {
                "address": _placeholders(names.account_subject("WORKER")),
                "description": "Where a worker is asked what it holds.",
                "parameters": {"worker": {"description": "The worker's id, as in `TokenFrame.worker`."}},
                "messages": {"AccountQuestion": _ref("components", "messages", "AccountQuestion")},
            },
            "status": {
                "address": names.STATUS_SUBJECT,
                "description": "Where a producer asks what has become of its job.",
                "messages": {"StatusQuestion": _ref("components", "messages", "StatusQuestion")},
            },
            "cancel": {
                "address": names.CANCEL_SUBJECT,
                "description": "To all workers: requests that were cancelled in the ledger.",
                "messages": {"Control": _ref("components", "messages", "Control")},
            },
        },
        "operations": {
            "submitJob": _operation("receive", "prefillJobs", "PrefillJob", "A producer asks for a completion."),
            "takePrefillJob": _pull("prefillJobs", "PrefillJob", "A prefill worker takes a request."),
            "takeDecodeJob": _pull("decodeJobs", "DecodeJob", "A decode worker takes a request."),
            "takeLocalJob": _pull("localJobs", "PrefillJob", "A decode worker takes a whole request."),
            "sendTokens": _operation("send", "tokens", "TokenFrame", "A worker sends one step's tokens, or the end."),
            "askOutput": {
                **_operation("send", "tokens", "OutputQuestion", "A resuming worker asks which tokens have arrived."),
                "reply": _reply("OutputAnswer"),
            },
            "askAccount": {
                **_operation("receive", "account", "AccountQuestion", "Anybody asks a worker what it holds now."),
                "reply": _reply("AccountAnswer"),
            },
            "askStatus": {
                **_operation("receive", "status", "StatusQuestion", "A producer asks what has become of its job."),
                "reply": _reply("StatusAnswer"),
            },
            "controlWorker": _operation(
                "receive", "worker", "Control", "Ask a worker to resend, to drain, or to stay."
            ),
            "cancelRequests": _operation("receive", "cancel", "Control", "Tell all workers what was cancelled."),
            "buryJob": _operation("send", "deadLetters", "DeadJob", "A worker rejects a job for good."),
        },
        "components": {
            "parameters": {
                "model": {"description": prose(_TOKEN_RULE)},
                "priority": {
                    "description": "`interactive` overtakes `batch`.",
                    "enum": list(names.PRIORITIES),
                    "default": "interactive",
                },
            },
            "messages": {
                **{name: _message(name) for name in _MESSAGES},
                "DeadJob": {
                    "summary": "A rejected job, byte for byte.",
                    "headers": {
                        "type": "object",
                        "properties": {
                            names.HEADER_DEAD_REASON: {"type": "string", "description": "The error's code."},
                            names.HEADER_DEAD_DETAIL: {"type": "string", "description": "The error's message."},
                            names.HEADER_DEAD_SUBJECT: {"type": "string", "description": "Where the job came from."},
                        },
                    },
                    "payload": {},
                },
            },
        },
    }


_MESSAGES: Final[dict[str, dict[str, str]]] = {
    "PrefillJob": {
        names.HEADER_MSG_ID: "Makes a repeated publish within the broker's duplicate window a no-op.",
        names.HEADER_TTL: "The broker drops the job after this time (for example `60s`).",
    },
    "DecodeJob": {names.HEADER_MSG_ID: "Request and attempt: one decode job for each."},
    "TokenFrame": {},
    "Control": {},
    "OutputQuestion": {},
    "OutputAnswer": {},
    "AccountQuestion": {},
    "AccountAnswer": {},
    "StatusQuestion": {},
    "StatusAnswer": {},
}
"""Messages with a schema file of the same name, and their headers."""


def text() -> str:
    """The document as YAML, always the same for the same types."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Block style, keys in the order given, long text as literal blocks, repeated parts written out."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, string)
    head = "# Generated by `pdq schemas --write` from pdq/core/names.py and the wire types. Do not edit.\n"
    return head + str(yaml.dump(document(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110))


def _queue_channel(stream: str, address: Callable[[str, str], str], message: str, about: str) -> dict[str, Any]:
    return {
        "address": _placeholders(address("MODEL", "{priority}")),
        "description": about,
        "parameters": {"model": _parameter("model"), "priority": _parameter("priority")},
        "messages": {message: _ref("components", "messages", message)},
        "x-jetstream": {
            "stream": stream,
            "subjects": [address("MODEL", priority).replace("MODEL", "*") for priority in names.PRIORITIES],
            "retention": "workqueue",
        },
    }


def _pull(channel: str, message: str, summary: str) -> dict[str, Any]:
    """A worker's side of a queue: a durable pull consumer that all workers of a model share, one per priority."""
    return {
        **_operation("receive", channel, message, summary),
        "bindings": {
            "nats": {
                "x-jetstream": {
                    "stream": _WORK_QUEUES[channel]["stream"],
                    "consumer": _placeholders(names.consumer("MODEL", "{priority}")),
                    "pull": True,
                    "ack": "explicit",
                },
                "bindingVersion": "0.1.0",
            }
        },
    }


def _operation(action: str, channel: str, message: str, summary: str) -> dict[str, Any]:
    return {
        "action": action,
        "channel": _ref("channels", channel),
        "summary": summary,
        "messages": [_ref("channels", channel, "messages", message)],
    }


def _reply(message: str) -> dict[str, Any]:
    return {
        "address": {"location": "$message.header#/reply", "description": "The request's inbox."},
        "channel": _ref("channels", "answers"),
        "messages": [_ref("channels", "answers", "messages", message)],
    }


def _message(name: str) -> dict[str, Any]:
    headers = {header: {"type": "string", "description": about} for header, about in _MESSAGES[name].items()}
    return {
        "name": name,
        **({"headers": {"type": "object", "properties": headers}} if headers else {}),
        "payload": {
            "schemaFormat": "application/schema+json;version=2020-12",
            "schema": {"$ref": f"./{name}.json"},
        },
    }


def _parameter(name: str) -> dict[str, str]:
    return _ref("components", "parameters", name)


def _ref(*path: str) -> dict[str, str]:
    return {"$ref": "#/" + "/".join(path)}


def _placeholders(address: str) -> str:
    """``names`` escapes braces in model names, so placeholders go through it in capitals."""
    for name in ("QUEUE", "MODEL", "WORKER"):
        address = address.replace(name, f"{{{name.lower()}}}")
    return address
