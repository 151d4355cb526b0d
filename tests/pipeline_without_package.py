"""Run in a process of its own, where hf_vanilla can't be imported: use a checkpoint's own pipeline, save it, use that.

Arguments: the task, or "" to have it found; folder of the checkpoint; folder for what is saved; a JSON file with the
arguments and options of the calls; a JSON file for what they return.
"""

import json
import shutil
import sys
from pathlib import Path

from transformers import pipeline


if __name__ == "__main__":
    sys.modules["hf_vanilla"] = None  # an import of it now fails
    task, folder, saved, calls_file, found_file = sys.argv[1:]
    calls = json.loads(Path(calls_file).read_text("utf-8"))
    pipe = pipeline(task or None, model=folder, trust_remote_code=True, device=-1)
    first = [pipe(*arguments, **options) for arguments, options in calls]
    pipe.save_pretrained(saved)
    shutil.rmtree(folder)  # what was saved must need nothing of it
    pipe = pipeline(task or None, model=saved, trust_remote_code=True, device=-1)
    again = [pipe(*arguments, **options) for arguments, options in calls]
    name = f"{type(pipe).__module__.split('.')[-1]}.{type(pipe).__name__}"
    Path(found_file).write_text(json.dumps({"first": first, "again": again, "class": name}), "utf-8")
