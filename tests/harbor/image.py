"""Prints the name of the image that holds the root file system of sandboxes; the Docker engine that answers has it
then."""

from environments.sandbox.engine import connected, image
from environments.sandbox.root import root_file_system

print(image(connected(), root_file_system()))
