"""FastDeploy's loggers: each writes into its own file of FD_LOG_DIR."""

import logging
import os
from pathlib import Path


def get_logger(name, file_name=None, without_formater=False, print_to_console=False):
    logger = logging.getLogger(f"fastdeploy.{name}")
    directory = Path(os.environ.get("FD_LOG_DIR", "log"))
    directory.mkdir(parents=True, exist_ok=True)
    if not logger.handlers:
        handler = logging.FileHandler(directory / (file_name or f"{name}.log"))
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s %(message)s"))
        logger.addHandler(handler)
    return logger
