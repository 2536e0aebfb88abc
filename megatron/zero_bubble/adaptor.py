"""The door: make `import megatron.zero_bubble.adaptor` the first import of a pretrain script.

Installs CPU mode where it is wanted and the patches, which change nothing in a run until
``--pipeline-schedule`` asks. First, because CPU mode must be there before Megatron is imported.
"""

from megatron.zero_bubble import launch

launch.install()
