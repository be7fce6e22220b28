"""Clients of a private S3 server."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config


def s3_client(url: str) -> Any:
    """A client as a program makes it."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
        config=Config(s3={"addressing_style": "path"}, proxies={}),
    )
