"""The real agent with stand-in devices: ``python -m tests.helpers.standin_agent`` and the usual options."""

from __future__ import annotations

import sys
from dataclasses import replace

from oobleckd.worker.agent import main as agent
from oobleckd.worker.agent.node import AgentConfig
from oobleckd.worker.fork.forking import Forker
from oobleckd.worker.processes.orphans import Orphans


def main() -> None:
    """Run the agent's own command line, with another program for its devices."""
    run = agent.run_agent
    program = (sys.executable, "-m", "tests.helpers.standin_device")

    def with_standins(config: AgentConfig) -> int:
        return run(replace(config, setting=replace(config.setting, program=program)))

    def forker_of_standins(node: str, orphans: Orphans) -> Forker | None:
        program = (sys.executable, "-m", "tests.helpers.standin_forker")
        return Forker(node, orphans, program) if orphans.adopt() else None

    agent.run_agent = with_standins
    agent.start_forker = forker_of_standins
    agent.main()


if __name__ == "__main__":
    main()
