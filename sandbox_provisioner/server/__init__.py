"""The Jupyter Server extension: kernel manager, REST API, events and metrics.

- ``app``: load the extension; ``kernel_manager``: culling, stopping and reopening of kernels
- ``kernel_websocket``: websockets that take turns to request a kernel's info
- ``handlers``: HTTP; ``openapi``: validation against openapi.yaml; ``problem_details``: errors as RFC 9457
- ``service``, ``creation``: the operations of the REST API, by ``operationId``; ``queries``: find and list sandboxes
- ``kernel_messages``: bound the effects of a kernel's messages on the server
- ``plain_kernels``: refuse kernels without a sandbox for notebooks that ran in a sandbox; ``jupyter_handlers``: Jupyter
  Server's own handlers that start kernels, with this package's errors
- ``exporters``: the exporters that a notebook may name
- ``models``: describe kernels and stored sandboxes for clients; ``kernels``: the server's sandboxed kernels
- ``execution``: stream a command's output; ``event_stream``: stream events; ``telemetry``: events, metrics, log
"""
