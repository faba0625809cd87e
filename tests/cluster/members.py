"""A member of a cluster as a process: it commits turns of its sessions until it is told otherwise.

    python -m tests.cluster.members URL NAME LIMIT

Reads commands, one a line, and answers each with one line of JSON: `claim NAME…`, `turn NAME NUMBER`,
`open NAME TENANT`, `give LIFE NAME…`, `drain`, `life`, `end`. A turn that the store accepts is answered
with `true`.
"""

import json
import sys
from dataclasses import replace
from typing import Any

from holdfast.engine.durable.membership import Membership
from holdfast.engine.durable.postgres.store import PostgresJournal
from holdfast.engine.durable.records import JournalError
from tests.engine.test_journal import ended, opened


def obey(journal: PostgresJournal, verb: str, *words: str) -> Any:
    """Carry a command out."""
    match verb:
        case "claim":
            claims = journal.claim(words)
            return {session.id: [turn.turn_id for turn in session.turns] for session in claims.sessions}
        case "turn":
            journal.append(ended(words[0], int(words[1])))
            stored = journal.flush()
            return stored and words[0] not in journal.take_refused()
        case "open":
            journal.append(replace(opened(words[0]), tenant=words[1]))
            stored = journal.flush()
            return stored and words[0] not in journal.take_refused()
        case "give":
            return sorted(journal.hand_over(words[1:], int(words[0])))
        case "drain":
            return journal.drain()
        case "life":
            return journal.life
    raise ValueError(verb)


def main() -> None:
    """Serve commands until the input ends, or `end`."""
    url, name, limit = sys.argv[1:]
    member = Membership(name, tenant_sessions=int(limit) if limit != "none" else None)
    journal = PostgresJournal(url, "commit", "v", member=member)
    for line in sys.stdin:
        words = line.split()
        if words == ["end"]:
            break
        try:
            answer = obey(journal, *words)
        except JournalError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    journal.close()


if __name__ == "__main__":
    main()
