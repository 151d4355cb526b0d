"""Ctrl-C while a command imports torch and transformers."""

import signal
import subprocess
import sys

import pytest


# Says when the imports begin, which take seconds; a sleep in their place, so that the signal comes while they run.
SLOW_IMPORT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("importing", flush=True)
            import time
            time.sleep(60)
sys.meta_path.insert(0, Slow())
import hf_vanilla_cli
sys.argv = ["hf-vanilla", "generate", "--model", "nowhere", "--prompt", "a"]
sys.exit(hf_vanilla_cli.main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no signals")
def test_interrupt_during_imports_ends_in_one_line():
    command = [sys.executable, "-c", SLOW_IMPORT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "\ninterrupted\n")
