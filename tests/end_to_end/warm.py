"""Imported once by the server of `workbench.Child`: what every start of the command line would spend its time on."""

import os
import tempfile
import threading
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU in use does not survive a fork, and these runs are on the CPU

import pytest  # noqa: F401  the main module of whoever starts the server, which each child imports again
import torch.utils.tensorboard  # noqa: F401
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import tuningfork.commands.data
import tuningfork.commands.evaluate
import tuningfork.commands.reference
import tuningfork.commands.train  # noqa: F401
from tests.end_to_end.workbench import make_model

tqdm.set_lock(threading.RLock())  # its own is a semaphore that would outlive a killed child
logging.disable_progress_bar()
with tempfile.TemporaryDirectory() as folder:
    AutoModelForCausalLM.from_pretrained(make_model(Path(folder)))
