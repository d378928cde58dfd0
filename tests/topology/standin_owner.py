"""An owner to kill: `python -m standin_owner FOLDER BOOT END SERVERS`, where SERVERS is JSON, a list of lists of habits.

Starts a launcher and stand-ins under FOLDER, writes FOLDER/owner.json (guard, scratch, what each stand-in has made), then ends
as END says: `wait` (for ever), `raise`, `return`, or `fork` (forks a child that holds everything it has inherited, then waits).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from topology_residue import QuickLauncher, start_standin, wait_ready

from epd_conformance.topology.launcher import Boot


def main() -> None:
    folder, boot, end, servers = Path(sys.argv[1]), Boot(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    # Whoever runs the tests with nohup, or in the background, hands on ignored signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_DFL)
    with QuickLauncher(boot, folder / "logs", os.environ) as launcher:
        for number, habits in enumerate(servers):
            start_standin(launcher, folder, f"server-{number}", habits)
        made = [wait_ready(folder, f"server-{number}") for number in range(len(servers))]
        child = os.fork() if end == "fork" else None
        if child == 0:
            time.sleep(60)
            os._exit(0)
        told = {"guard": launcher.guard_pid, "scratch": str(launcher.scratch), "child": child, "servers": made}
        (folder / "owner.part").write_text(json.dumps(told), encoding="utf-8")
        (folder / "owner.part").rename(folder / "owner.json")
        if end == "raise":
            raise RuntimeError("the owner gives up")
        if end != "return":
            time.sleep(60)


if __name__ == "__main__":
    main()
