"""The scripts, which an installed package has as `hf_vanilla.scripts` and as the commands of `hf-vanilla`."""
