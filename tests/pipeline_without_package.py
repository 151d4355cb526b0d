"""Run in a separate process without hf_vanilla: call a checkpoint's own pipeline, save it, and call it again.

Arguments: the task, or "" to infer it; folder of the checkpoint; folder to save to; a JSON file with the arguments and
options of the calls; a JSON file for their results.
"""

import json
import shutil
import sys
from pathlib import Path

from transformers import pipeline


if __name__ == "__main__":
    sys.modules["hf_vanilla"] = None  # makes its import fail
    task, folder, saved, calls_file, found_file = sys.argv[1:]
    calls = json.loads(Path(calls_file).read_text("utf-8"))
    pipe = pipeline(task or None, model=folder, trust_remote_code=True, device=-1)
    first = [pipe(*arguments, **options) for arguments, options in calls]
    pipe.save_pretrained(saved)
    shutil.rmtree(folder)  # the saved pipeline must not need it
    pipe = pipeline(task or None, model=saved, trust_remote_code=True, device=-1)
    again = [pipe(*arguments, **options) for arguments, options in calls]
    name = f"{type(pipe).__module__.split('.')[-1]}.{type(pipe).__name__}"
    Path(found_file).write_text(json.dumps({"first": first, "again": again, "class": name}), "utf-8")
