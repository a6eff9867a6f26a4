"""The Jupyter Server extension: kernel manager, REST API, events and metrics.

- ``app``: load the extension; ``kernel_manager``: culling and stopping of kernels
- ``kernel_websocket``: websockets that share their kernel_info requests
- ``settings``: report the effective settings
- ``handlers``: HTTP; ``openapi``: validation against openapi.yaml; ``problem_details``: errors as RFC 9457
- ``service``, ``creation``: the operations of the REST API, by ``operationId``; ``queries``: find and list sandboxes
- ``kernel_messages``: protect the server against malformed and too many messages of a kernel
- ``plain_kernels``: refuse kernels without a sandbox for notebooks that ran in a sandbox; ``jupyter_handlers``: Jupyter
  Server's own handlers that start kernels, with this package's errors
- ``drives``: paths that begin with the name of a drive
- ``exporters``: restrict the nbconvert exporters that a notebook can choose
- ``models``: describe kernels and stored sandboxes for clients; ``kernels``: the server's sandboxed kernels
- ``execution``: stream a command's output; ``event_stream``: stream events; ``telemetry``: events, metrics, log
"""
