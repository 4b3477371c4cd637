"""A machine within the machine: what an agent runs there sees and changes nothing else. `open.py` is the door,
`interface.py` what comes out."""
