"""OpenAI's API: completions, chats and responses, from a request's fields to the events of an answer.

`requests` and `response_items` read what is asked, `completions` and `responses` begin sessions, `answers` tells what
comes of them. It knows no connection: `orchestrator.http` reads bodies and decides who may call.
"""
