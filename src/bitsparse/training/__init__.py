"""Training of small language models, for the ``bitsparse`` command. Needs the ``cli`` extra."""
