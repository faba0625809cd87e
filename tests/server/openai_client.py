"""OpenAI's Python client of a server, which repeats nothing."""

import openai

from tests.plain import NO_TLS
from tests.server.serving import Server


def openai_client(server: Server) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=NO_TLS)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)
