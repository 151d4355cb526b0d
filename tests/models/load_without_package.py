"""Load, train, save and reload a checkpoint with its own code, in a process that can't import hf_vanilla.

Arguments: folder of the checkpoint, folder to save to, file with the inputs, file for the outputs.
"""

import shutil
import sys

import torch
import transformers


def outputs_of(folder, inputs):
    """Compute the output of each Auto class of the checkpoint; missing heads are initialised with one seed."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    found = {}
    for name in sorted(config.auto_map):
        if name == "AutoConfig":
            continue
        torch.manual_seed(0)
        model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True)
        with torch.no_grad():
            found[name] = [type(model).__name__, model(**inputs[name]).to_tuple()[0]]
    return found


if __name__ == "__main__":
    sys.modules["hf_vanilla"] = None  # an import of it now fails
    folder, saved, inputs_file, outputs_file = sys.argv[1:]
    inputs = torch.load(inputs_file)
    first = outputs_of(folder, inputs["eval"])
    model = getattr(transformers, inputs["trained"]).from_pretrained(folder, trust_remote_code=True).train()
    torch.manual_seed(0)
    model(**inputs["train"]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval().save_pretrained(saved)
    shutil.rmtree(folder)  # the saved checkpoint must not need it
    torch.save({"first": first, "second": outputs_of(saved, inputs["eval"])}, outputs_file)
