"""The gRPC worker's server: RocketMQ 5's clients (`apache.rocketmq.v2`), each request translated into those of the gateway.

It decides nothing about messages: sends, receipts, members, transactions and rights are the gateway's, which it reaches over a
Unix socket (grpc_clients.py), so that a slow HTTP/2 stack stalls no client of 4.9. It holds nothing that must outlive it: a
handle and a transaction's id say all that is needed. Topics and groups it reads from their files. Docs: docs/gateway.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import itertools
import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pyengine.engine_config import EngineConfig
from pyengine.errors import EngineError
from pyengine.events import Event, Report
from pyengine.formats.constants import (
    PROPERTY_TRANSACTION_CHECK_TIMES,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from pyengine.formats.record import Message, decode_record
from pyengine.gateway import codes
from pyengine.gateway.connections import INT32_MASK, REQUESTER, TurnExecutor, host_of
from pyengine.gateway.gateway import Server, repeat
from pyengine.gateway.grpc_clients import GrpcClient, GrpcClients, TooManyClientsError, address_of
from pyengine.gateway.grpc_messages import (
    REQUEST_BYTES_MAX,
    CallRefusedError,
    Schema,
    Translator,
    set_time,
    time_ms,
    transaction_fields,
    transaction_id,
)
from pyengine.gateway.members import SUBSCRIPTIONS_MAX
from pyengine.gateway.names import Names, group_fault, topic_fault
from pyengine.gateway.pop import EXPIRED
from pyengine.gateway.tasks import Tasks
from pyengine.gateway.wire import Frame, is_number
from pyengine.settings import join_address
from pyengine.storage.config_table import PERM_READ, PERM_WRITE, SubscriptionGroup, TopicConfig

CALL_S = 3.0                    # of a call whose client names no deadline
REFUSED_S = 0.5                 # for the message of a call that is refused before it is read: it usually comes with the call
DEADLINE_S = 0.1                # before a client's deadline: the answer must still reach it
DEADLINE_S_MAX = 60.0           # whatever a client's deadline is
UNREQUESTED_S = 2               # of a call that waits in gRPC's queue
POLL_S = 20.0                   # of a receive that names no time
GATEWAY_ANSWER_S = 60.0         # after a held receive has ended: what comes later is nobody's until its time is over
INVISIBLE_MS = 60_000           # of a message whose consumer's worker renews it: after the end of its connection
INVISIBLE_MS_MAX = 12 * 3_600_000
BATCH_MAX = 32                  # messages of one receive
ENDPOINTS_BYTES_MAX = 4096      # of the address that a client used: each queue of an answer has it
ENTRIES_MAX = 1024              # of one acknowledgement, and messages of one send
READ_AHEAD_S = 0.1              # between two looks for changed topics and groups
EXPIRE_S = 1.0                  # between two looks for clients that have gone
CALLS_OF_CONNECTION_MAX = 1024  # at a time
PING_S, PING_ANSWER_S = 30, 20  # of connections that say nothing, so that half-open ones end
BACKOFF_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
_SIGNED = "MQv2-HMAC-SHA1 "
_ENDS = {1: SYS_FLAG_TRANSACTION_COMMIT, 2: SYS_FLAG_TRANSACTION_ROLLBACK}  # by TransactionResolution
_REFUSALS = {  # RocketMQ 5's code by that of the gateway's answer
    codes.SUCCESS: "OK", codes.FLUSH_DISK_TIMEOUT: "MASTER_PERSISTENCE_TIMEOUT", codes.FLUSH_SLAVE_TIMEOUT: "SLAVE_PERSISTENCE_TIMEOUT",
    codes.SLAVE_NOT_AVAILABLE: "HA_NOT_AVAILABLE", codes.MESSAGE_ILLEGAL: "MESSAGE_PROPERTIES_TOO_LARGE",
    codes.NO_PERMISSION: "FORBIDDEN", codes.TOPIC_NOT_EXIST: "TOPIC_NOT_FOUND", codes.SYSTEM_BUSY: "TOO_MANY_REQUESTS",
    codes.SUBSCRIPTION_GROUP_NOT_EXIST: "CONSUMER_GROUP_NOT_FOUND", codes.SUBSCRIPTION_PARSE_FAILED: "ILLEGAL_FILTER_EXPRESSION",
    codes.POLLING_FULL: "TOO_MANY_REQUESTS", codes.POLLING_TIMEOUT: "MESSAGE_NOT_FOUND", codes.NO_MESSAGE: "INVALID_RECEIPT_HANDLE",
    codes.INVALID_PARAMETER: "BAD_REQUEST",
}
_ACCESS = "org.apache.rocketmq.acl.common.AclException: "

Work = Callable[[GrpcClient, Any, Any], Awaitable[Any]]


class GrpcServer(Server):
    """The service at its port. All but the constructor is called in an event loop."""

    def __init__(self, root: Path, config: EngineConfig, folder: Path, *, report: Report) -> None:
        super().__init__(root, config, TurnExecutor(1, "grpc"), report)
        self._v2 = Schema()
        self._names = Names(root, config, self._executor)
        self._clients = GrpcClients(folder, self._limits, config.grpc_calls_max)
        self._translator = Translator(self._v2, config.broker_name, config.max_message_size_bytes)
        self._turns = itertools.count()
        self._endpoints: dict[bool, Any] = {}  # by whether they take TLS
        self._server: Any = None
        self._background = Tasks()

    # ---- its life -----------------------------------------------------------------

    async def start(self) -> int:
        """Begin to listen and serve; return the port. OSError if it, or the certificate, is not available."""
        config = self._config
        server = grpc.aio.server(maximum_concurrent_rpcs=config.grpc_calls_max, options=_options(config))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self._v2.service, self._handlers()),))
        if self._access is not None:
            with contextlib.suppress(EngineError):  # reported by the next reload; until then every client is refused
                await self._reload(self._access)
        with contextlib.suppress(EngineError):  # as above
            await self._names.read_ahead()
        try:
            port = self._listen(server, config.grpc_port, is_secure=self._tls is not None)
            plain = self._listen(server, config.grpc_plain_port, is_secure=False) if config.grpc_plain_port else 0
        except OSError:
            await server.start()  # one that has not begun cannot be stopped, and keeps the first port
            await server.stop(None)
            raise
        await server.start()
        self._server = server
        self._begin(
            repeat(EXPIRE_S, self._clients.expire, self._report, "clients that have gone cannot be left out"),
            repeat(READ_AHEAD_S, self._names.read_ahead, self._report, "topics and groups cannot be read"),
            repeat(EXPIRE_S, self._end_surplus, self._report, "connections beyond a host's share cannot be ended"),
            watched=(self._access,))
        without = f", without TLS at port {plain}" if plain else ""
        self._report(Event.GRPC_LISTENS, f"RocketMQ 5 at {join_address(config.grpc_listen_host, port)}, TLS "
                                         f"{'off' if self._tls is None else 'on'}{without}, access list "
                                         f"{'off' if self._access is None else 'on'}")
        return port

    def _listen(self, server: Any, port: int, *, is_secure: bool) -> int:
        """Bind a port for clients with or without TLS; return its number. OSError if it, or the certificate, is not available."""
        host = self._config.grpc_listen_host
        address = join_address(host, port)
        try:
            found = int(server.add_secure_port(address, self._credentials()) if is_secure else server.add_insecure_port(address))
        except EngineError as error:
            raise OSError(errno.EINVAL, str(error)) from error
        except RuntimeError:
            advice = "stop what listens there, or set grpc_listen_host and grpc_port"
            raise OSError(errno.EADDRINUSE, f"{address} is not free: {advice}") from None
        advertised = self._config.gateway_advertised_host or host
        endpoints = self._endpoints[is_secure] = self._v2.Endpoints(scheme=_scheme(self._v2, advertised))
        endpoints.addresses.add(host=advertised, port=found)
        return found

    async def close(self) -> None:
        """End in order: take no more calls, answer those that are under way, then end the connections to the gateway."""
        await self._end_tasks()
        if self._server is not None:
            await self._server.stop(1.0)
        with contextlib.suppress(TimeoutError):  # the gateway hangs, say
            async with asyncio.timeout(CALL_S):
                while self._background:  # calls give back what was popped for them
                    await asyncio.gather(*self._background, return_exceptions=True)
        await self._clients.close()
        self._executor.shutdown(wait=True, cancel_futures=True)

    async def _end_surplus(self) -> None:
        ports = [endpoints.addresses[0].port for endpoints in self._endpoints.values()]
        for host, number in (await self._executor.run(self._clients.surplus, ports, self._clients.addresses())).items():
            self._tell(Event.CLIENT_REFUSED, host, f"{number} connections beyond its share are ended (gateway_address_connections_max)")

    def _credentials(self) -> Any:
        """Return credentials that read a renewed certificate at the next handshake; CertificateError."""
        tls, config = self._tls, self._config
        assert tls is not None

        def read() -> Any:
            return grpc.ssl_server_certificate_configuration(*tls.read())

        def renewed() -> Any:
            try:
                sentence = tls.reload()
            except EngineError as error:
                self._lines.report("", Event.GATEWAY_ACCESS, f"{tls.FAILURE}: {error}", time.monotonic_ns())
                return None
            return read() if sentence else None

        tls.reload()
        return grpc.dynamic_ssl_server_credentials(read(), renewed, config.gateway_tls_client_auth == "require")

    # ---- calls --------------------------------------------------------------------

    def _handlers(self) -> dict[str, Any]:
        """Return the methods' handlers. gRPC begins to serve a call of one message like a stream: at once, so that it counts as its
        host's, and its message has a deadline."""
        serve: dict[str, Work] = {
            "QueryRoute": self._query_route, "Heartbeat": self._heartbeat, "SendMessage": self._send,
            "QueryAssignment": self._query_assignment, "AckMessage": self._acknowledge,
            "ForwardMessageToDeadLetterQueue": self._forward_to_dead_letters, "EndTransaction": self._end_transaction,
            "NotifyClientTermination": self._terminate, "ChangeInvisibleDuration": self._change_invisible, "RecallMessage": self._recall}
        streams: dict[str, Work] = {"ReceiveMessage": self._receive, "Telemetry": self._telemetry}
        handlers = {}
        for name, method in self._v2.methods.items():
            make = grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
            request, answer = (getattr(self._v2, each.name) for each in (method.input_type, method.output_type))
            work = self._serving((streams if method.server_streaming else serve).get(name, self._not_served), method, request, answer,
                                 may_be_large=name == "SendMessage")
            handlers[name] = make(work, None, answer.SerializeToString)
        return handlers

    def _serving(self, work: Work, method: Any, request_of: Any, answer_of: Any, *, may_be_large: bool
                 ) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return what serves a method's calls by `work`, which returns the answer, or writes those of a stream."""
        async def read(context: Any, until_s: float) -> tuple[Any, int]:
            """Return a call's one message, and its size. It is parsed here, since tiny parts of a large one take long."""
            try:
                async with asyncio.timeout_at(until_s):
                    sent = await context.read()
            except TimeoutError:
                raise CallRefusedError("REQUEST_TIMEOUT", "the call's message has not come in time") from None
            if sent is grpc.aio.EOF:
                raise CallRefusedError("BAD_REQUEST", "the call has no message")
            _check_size(self._v2.bytes_beside_bodies(sent) if may_be_large else len(sent))
            try:
                return request_of.FromString(sent), len(sent)
            except DecodeError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"these {len(sent)} bytes are no {method.input_type.name}")
                raise

        async def serve(requests: Any, context: Any) -> Any:
            call = asyncio.current_task()
            assert call is not None
            self._background.follow(call)
            if not self._clients.admit(context.peer(), call):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls from there have not ended (grpc_calls_max)")
            request = requests
            try:
                if (left_s := context.time_remaining()) is not None and left_s <= DEADLINE_S:
                    raise CallRefusedError("TOO_MANY_REQUESTS", "no time is left before the call's deadline")
                async with self._call(context) as client:
                    if not method.client_streaming:
                        request, size_bytes = await read(context, _until_s(context))
                        if may_be_large:
                            self._hold(client, size_bytes)
                    await self._clients.turn(client)
                    return await work(client, request, context)
            except CallRefusedError as refused:
                answer = answer_of(status=self._status(refused.code, str(refused)))
                if answer_of is self._v2.ChangeInvisibleDurationResponse:  # whose handle Python's client takes from a refusal too
                    with contextlib.suppress(CallRefusedError):
                        if request is requests:
                            request, _ = await read(context, time.monotonic() + REFUSED_S)
                        answer.receipt_handle = request.receipt_handle
                if not method.server_streaming:
                    return answer
                if not context.done():
                    await context.write(answer)

        return serve

    def _hold(self, client: GrpcClient, size_bytes: int) -> None:
        """Count bytes of this call until its answer has been sent, or its client has gone; TooManyClientsError."""
        held, call = contextlib.ExitStack(), asyncio.current_task()
        assert call is not None
        held.enter_context(self._clients.holding(client, size_bytes))
        call.add_done_callback(lambda _: held.close())

    @contextlib.asynccontextmanager
    async def _call(self, context: Any) -> AsyncIterator[GrpcClient]:
        """Give the client of a call, if it may call; raise what goes wrong in it as CallRefusedError."""
        metadata = dict(context.invocation_metadata() or ())
        peer = context.peer()
        try:
            key = self._account(metadata, peer)
            client_id = metadata.get("x-mq-client-id", "")
            if not client_id or len(client_id) > 512:
                raise CallRefusedError("CLIENT_ID_REQUIRED", "the call's metadata has no x-mq-client-id of at most 512 characters")
            is_secure = True in self._endpoints and context.auth_context().get("transport_security_type") == [b"ssl"]
            client = self._clients.find(client_id, peer, key, metadata.get("x-mq-language", "").upper(), is_secure=is_secure)
            client.namespace = metadata.get("x-mq-namespace", "")
            with self._clients.calling(client):
                yield client
        except TooManyClientsError as error:
            raise CallRefusedError("TOO_MANY_REQUESTS", str(error)) from None
        except EngineError as error:
            raise CallRefusedError("INTERNAL_SERVER_ERROR", str(error)) from None
        except (CallRefusedError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 - one call's: the others are served
            self._tell_failure(context, error)
            raise CallRefusedError("INTERNAL_ERROR", repr(error)) from None

    def _tell_failure(self, context: Any, error: Exception) -> None:
        if not context.done():  # else its client has gone, and cannot be written to
            self._tell(Event.CLIENT_FAILED, host_of(address_of(context.peer())), f"a call failed: {error!r}")

    def _account(self, metadata: dict[str, str], peer: str) -> str:
        """Return the access key of a call whose signature is right; CallRefusedError. The gateway checks the rights."""
        if self._access is None:
            return ""
        words = dict(word.strip().partition("=")[::2] for word in metadata.get("authorization", "").removeprefix(_SIGNED).split(","))
        key, host = words.get("Credential", "").partition("/")[0], host_of(address_of(peer))
        if fault := self._access.call_fault(key, metadata.get("x-mq-date-time", ""), words.get("Signature", ""), host):
            self._tell(Event.CLIENT_REFUSED, host, fault)
            raise CallRefusedError("UNAUTHORIZED", fault)
        return key

    def _status(self, code: str, text: str = "") -> Any:
        return self._v2.Status(code=getattr(self._v2, code), message=text or code)

    def _status_of(self, frame: Frame) -> Any:
        """Return RocketMQ 5's status of an answer of the gateway."""
        code, remark = _REFUSALS.get(frame.code, "INTERNAL_SERVER_ERROR"), frame.remark or ""
        if frame.code == codes.SUCCESS and remark == EXPIRED:
            code = "INVALID_RECEIPT_HANDLE"
        if frame.code == codes.MESSAGE_ILLEGAL and "propert" not in remark.rpartition("(")[2]:  # the reason after RocketMQ's text
            code = "MESSAGE_BODY_TOO_LARGE"
        if frame.code == codes.SYSTEM_ERROR and remark.startswith(_ACCESS):
            return self._status("UNAUTHORIZED", remark.removeprefix(_ACCESS))  # as RocketMQ's proxy, for each refusal of its list
        return self._status(code, remark)

    async def _not_served(self, client: GrpcClient, request: Any, context: Any) -> Any:
        raise CallRefusedError("NOT_IMPLEMENTED", "it is not served, since no client of RocketMQ 5 calls it")

    # ---- names --------------------------------------------------------------------

    async def _topic(self, client: GrpcClient, resource: Any) -> tuple[str, TopicConfig]:
        name = client.name_of(resource)
        if fault := topic_fault(name):
            raise CallRefusedError("ILLEGAL_TOPIC", fault)
        found = self._names.recent_topic(name)
        if found is None:  # it may be new
            await self._names.read_ahead()
            found = self._names.recent_topic(name)
        if found is None:
            raise CallRefusedError("TOPIC_NOT_FOUND", f"there is no topic {name}: create it (`pyengine topics`, mqadmin updateTopic)")
        return name, found

    def _group(self, client: GrpcClient, resource: Any) -> str:
        name = client.name_of(resource)
        if fault := group_fault(name):
            raise CallRefusedError("ILLEGAL_CONSUMER_GROUP", fault)
        return name

    async def _group_row(self, group: str) -> SubscriptionGroup:
        found = self._names.group(group)
        if found is None:  # it may be new
            await self._names.read_ahead()
            found = self._names.group(group)
        return found or SubscriptionGroup(group)

    def _message_types(self, topic: TopicConfig) -> list[int]:
        """Return which types of messages a topic takes: those that a tool of RocketMQ 5 gave it, else all."""
        v2 = self._v2
        attributes = topic.more.get("attributes")
        kind = attributes.get("message.type", attributes.get("+message.type")) if isinstance(attributes, dict) else None
        every = ("NORMAL", "FIFO", "DELAY", "TRANSACTION")
        return [getattr(v2, name) for name in ((kind,) if kind in every else every)]

    def _queue(self, client: GrpcClient, resource: Any, queue_id: int, permission: int, endpoints: Any) -> Any:
        """Return a queue at the address by which the client has reached its port, or at the advertised one."""
        if endpoints.ByteSize() > ENDPOINTS_BYTES_MAX:
            raise CallRefusedError("ILLEGAL_ACCESS_POINT", f"the endpoints have more than {ENDPOINTS_BYTES_MAX} bytes")
        broker = self._v2.Broker(name=self._config.broker_name, id=0,
                                 endpoints=endpoints if endpoints.addresses else self._endpoints[client.is_secure])
        return self._v2.MessageQueue(topic=resource, id=queue_id, permission=permission, broker=broker)

    async def _query_route(self, client: GrpcClient, request: Any, context: Any) -> Any:
        v2, (_, topic) = self._v2, await self._topic(client, request.topic)
        answer = v2.QueryRouteResponse(status=self._status("OK"))
        types = self._message_types(topic)
        for queue_id in range(max(topic.read_queue_nums, topic.write_queue_nums)):
            may_read = topic.perm & PERM_READ and queue_id < topic.read_queue_nums
            may_write = topic.perm & PERM_WRITE and queue_id < topic.write_queue_nums
            if may_read or may_write:
                permission = v2.READ_WRITE if may_read and may_write else v2.READ if may_read else v2.WRITE
                queue = self._queue(client, request.topic, queue_id, permission, request.endpoints)
                queue.accept_message_types.extend(types)
                answer.message_queues.append(queue)
        self._hold(client, answer.ByteSize())
        return answer

    async def _query_assignment(self, client: GrpcClient, request: Any, context: Any) -> Any:
        v2, (name, topic) = self._v2, await self._topic(client, request.topic)
        answer = v2.QueryAssignmentResponse(status=self._status("OK"))
        if topic.perm & PERM_READ:
            await self._names.read_ahead()  # for a group that was changed just now; its client keeps the answer
            group = await self._group_row(self._group(client, request.group))
            for queue_id in range(topic.read_queue_nums) if group.is_ordered else [-1]:
                answer.assignments.add(message_queue=self._queue(client, request.topic, queue_id, v2.READ_WRITE, request.endpoints))
        if not answer.assignments:
            raise CallRefusedError("FORBIDDEN", f"the topic {name} has no readable queue")
        self._hold(client, answer.ByteSize())
        return answer

    # ---- members ------------------------------------------------------------------

    async def _heartbeat(self, client: GrpcClient, request: Any, context: Any) -> Any:
        if not request.client_type:
            raise CallRefusedError("UNRECOGNIZED_CLIENT_TYPE", "a heartbeat names the type of its client")
        if request.HasField("group"):
            client.add(client.groups, [self._group(client, request.group)])
        return self._v2.HeartbeatResponse(status=await self._beat(client, context))

    async def _beat(self, client: GrpcClient, context: Any) -> Any:
        return self._status_of(await client.ask(codes.HEART_BEAT, {}, client.heartbeat(), until_s=_until_s(context)))

    async def _terminate(self, client: GrpcClient, request: Any, context: Any) -> Any:
        await self._clients.remove(client)
        return self._v2.NotifyClientTerminationResponse(status=self._status("OK"))

    async def _telemetry(self, client: GrpcClient, requests: Any, context: Any) -> None:
        """Answer the client's settings, and pass on the gateway's questions, until either side ends the stream."""
        client.streams += 1
        work = [asyncio.ensure_future(each) for each in (
            self._take_settings(client, requests, context), self._pass_on(client, context), client.has_left.wait())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            client.streams -= 1
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _take_settings(self, client: GrpcClient, commands: Any, context: Any) -> None:
        v2 = self._v2
        async for sent in commands:
            _check_size(len(sent))
            command = v2.TelemetryCommand.FromString(sent)
            if command.WhichOneof("command") != "settings":
                continue  # what a client says of itself
            settings = command.settings
            if max(len(settings.publishing.topics), len(settings.subscription.subscriptions)) > SUBSCRIPTIONS_MAX:
                raise CallRefusedError("TOO_MANY_REQUESTS", f"settings with more than {SUBSCRIPTIONS_MAX} topics")
            if settings.HasField("publishing"):
                client.add(client.producer_groups, map(client.name_of, settings.publishing.topics))
                settings.backoff_policy.CopyFrom(v2.RetryPolicy(max_attempts=3, exponential_backoff=v2.ExponentialBackoff(multiplier=2)))
                backoff = settings.backoff_policy.exponential_backoff
                backoff.initial.nanos, backoff.max.seconds = 10_000_000, 1
                settings.publishing.max_body_size = self._config.max_message_size_bytes
                settings.publishing.validate_message_type = True
                client.take(settings)
            else:
                group = self._group(client, settings.subscription.group)
                client.add(client.groups, [group])
                client.take(settings)
                await self._beat(client, context)  # a new group is known from now on
                await self._names.read_ahead()  # as above
                self._give_subscription(settings, await self._group_row(group))
            status = await self._beat(client, context)
            async with client.writing:
                await context.write(v2.TelemetryCommand(status=status, settings=settings))

    def _give_subscription(self, settings: Any, group: SubscriptionGroup) -> None:
        settings.backoff_policy.Clear()
        settings.backoff_policy.max_attempts = group.retry_max_times + 1
        if settings.user_agent.language == self._v2.NODE_JS:  # which knows no other kind, and makes a dead letter of the first failure
            backoff = settings.backoff_policy.exponential_backoff
            backoff.multiplier = 2
            backoff.initial.seconds, backoff.max.seconds = BACKOFF_S[0] * 1000, BACKOFF_S[-1] * 1000  # it waits so many milliseconds
        else:
            for pause_s in BACKOFF_S:
                settings.backoff_policy.customized_backoff.next.add(seconds=pause_s)
        settings.subscription.fifo = group.is_ordered
        settings.subscription.receive_batch_size = BATCH_MAX
        settings.subscription.long_polling_timeout.seconds = int(POLL_S)

    async def _pass_on(self, client: GrpcClient, context: Any) -> None:
        """Ask the client about transactions of which the gateway knows no end."""
        v2 = self._v2
        while True:
            frame = await client.questions.get()
            record, fields = decode_record(frame.body), frame.fields
            command = v2.TelemetryCommand()
            orphan = command.recover_orphaned_transaction_command
            namespace, name = client.in_namespace(record.topic)
            orphan.message.CopyFrom(self._translator.received(record, v2.Resource(resource_namespace=namespace, name=name)))
            if times := record.properties.get(PROPERTY_TRANSACTION_CHECK_TIMES):
                orphan.message.user_properties[PROPERTY_TRANSACTION_CHECK_TIMES] = times
            orphan.transaction_id = f"{int(fields['commitLogOffset']):x}-{int(fields['tranStateTableOffset']):x}"
            async with client.writing:
                await context.write(command)

    # ---- sends --------------------------------------------------------------------

    async def _send(self, client: GrpcClient, request: Any, context: Any) -> Any:
        if not 0 < len(request.messages) <= ENTRIES_MAX:
            raise CallRefusedError("BAD_REQUEST", f"a request to send has 1 to {ENTRIES_MAX} messages")
        answer = self._v2.SendMessageResponse()
        for message in request.messages:  # one after the other: those of a message group keep their order
            try:
                answer.entries.append(await self._send_one(client, message, context))
            except CallRefusedError as refused:
                answer.entries.add(status=self._status(refused.code, str(refused)))
        self._sum_up(answer)
        return answer

    async def _send_one(self, client: GrpcClient, message: Any, context: Any) -> Any:
        v2, (name, topic), system = self._v2, await self._topic(client, message.topic), message.system_properties
        queues = topic.write_queue_nums
        if not topic.perm & PERM_WRITE or queues <= 0:
            raise CallRefusedError("FORBIDDEN", f"the topic {name} takes no messages")
        if getattr(v2, kind := self._translator.type_of_sent(system)) not in self._message_types(topic):
            raise CallRefusedError("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE",
                                   f"the topic {name} takes no {kind} message: its attribute message.type names the one type that it takes")
        queue_id = zlib.crc32(system.message_group.encode()) if system.message_group else next(self._turns)
        fields = self._translator.send_fields(message, name, queue_id % queues)
        is_half = system.message_type == v2.TRANSACTION
        if is_half and name not in client.producer_groups:
            client.add(client.producer_groups, [name])  # that of its transactions
            await self._beat(client, context)
        frame = await client.ask(codes.SEND_MESSAGE_V2, fields, message.body, until_s=_until_s(context), again=False)
        found = frame.fields
        if "queueOffset" not in found:
            return v2.SendResultEntry(status=self._status_of(frame))
        offset = found["queueOffset"]
        return v2.SendResultEntry(
            status=self._status_of(frame), message_id=system.message_id, offset=int(offset),
            transaction_id=transaction_id(found["msgId"], offset) if is_half else system.message_id,
            recall_handle=found.get("recallHandle", ""))

    def _sum_up(self, answer: Any) -> None:
        """Set the status of an answer: that of its entries, or MULTIPLE_RESULTS."""
        if len({entry.status.code for entry in answer.entries}) == 1:
            answer.status.CopyFrom(answer.entries[0].status)
        else:
            answer.status.CopyFrom(self._status("MULTIPLE_RESULTS"))

    async def _end_transaction(self, client: GrpcClient, request: Any, context: Any) -> Any:
        name = client.name_of(request.topic)
        if request.resolution not in _ENDS:
            raise CallRefusedError("BAD_REQUEST", "a transaction ends with COMMIT or ROLLBACK")
        frame = await client.ask(codes.END_TRANSACTION, {
            **transaction_fields(request.transaction_id), "producerGroup": name, "commitOrRollback": str(_ENDS[request.resolution]),
            "fromTransactionCheck": str(request.source == self._v2.SOURCE_SERVER_CHECK).lower(), "msgId": request.message_id,
            "transactionId": request.message_id}, until_s=_until_s(context), again=False)  # a commit would be stored twice
        if frame.code == codes.SYSTEM_ERROR and not (frame.remark or "").startswith(_ACCESS):
            raise CallRefusedError("INVALID_TRANSACTION_ID", frame.remark or "")
        return self._v2.EndTransactionResponse(status=self._status_of(frame))

    async def _recall(self, client: GrpcClient, request: Any, context: Any) -> Any:
        frame = await client.ask(codes.RECALL_MESSAGE, {"topic": client.name_of(request.topic), "recallHandle": request.recall_handle},
                                 until_s=_until_s(context))
        return self._v2.RecallMessageResponse(status=self._status_of(frame), message_id=frame.fields.get("msgId", ""))

    # ---- receipts -----------------------------------------------------------------

    async def _receive(self, client: GrpcClient, request: Any, context: Any) -> None:
        """Send what the gateway gives within the time that the client waits: a status, messages, a time."""
        v2, queue, expression = self._v2, request.message_queue, request.filter_expression
        group, (name, _) = self._group(client, request.group), await self._topic(client, queue.topic)
        is_fifo = (await self._group_row(group)).is_ordered
        # A simple consumer names one queue after another, and would wait at an empty one: as RocketMQ's proxy, any will do.
        fields = {"consumerGroup": group, "topic": name, "queueId": str(queue.id if is_fifo else -1),
                  "maxMsgNums": str(min(max(1, request.batch_size), BATCH_MAX)), "initMode": "0",
                  "expType": "SQL92" if expression.type == v2.SQL else "TAG", "exp": expression.expression or "*",
                  "order": str(is_fifo).lower()}
        if request.auto_renew:
            fields |= {"autoRenew": "true", "invisibleTime": str(INVISIBLE_MS)}
        else:
            fields["invisibleTime"] = str(_invisible_ms(request.invisible_duration))
        if request.attempt_id:
            fields["attemptId"] = request.attempt_id
        poll_s = time_ms(request.long_polling_timeout) / 1000 if request.HasField("long_polling_timeout") else POLL_S
        poll_s = max(0.0, min(poll_s, _until_s(context, POLL_S + CALL_S) - time.monotonic() - 0.5))
        fields["pollTime"] = str(round(poll_s * 1000))
        frame = await client.pop(fields, lambda popped: self._background.begin(self._give_back_late((group, name), popped)),
                                 until_s=time.monotonic() + poll_s + GATEWAY_ANSWER_S)
        await self._deliver(client, (group, name), queue.topic, frame, context)

    async def _deliver(self, client: GrpcClient, names: tuple[str, str], topic: Any, frame: Frame, context: Any) -> None:
        """Send what was popped; give back at once what the client does not take."""
        answer = self._v2.ReceiveMessageResponse
        records = _records(frame) if frame.code == codes.SUCCESS else []
        if not records:
            is_empty = frame.code in (codes.SUCCESS, codes.POLLING_TIMEOUT)
            await context.write(answer(status=self._status("MESSAGE_NOT_FOUND", "no new message") if is_empty else self._status_of(frame)))
            return
        left = handles = [self._translator.handle(record, frame.fields) for record in records]
        tries, number = _tries(frame.fields.get("orderCountInfo", "")), 0
        REQUESTER.set(client)  # in its call: bodies are decompressed in its turns
        try:
            try:
                with self._clients.holding(client, len(frame.body)):
                    await context.write(answer(status=self._status("OK")))
                    for number, record in enumerate(records):
                        attempt = min(record.reconsume_times + 1 + tries.get((record.queue_id, record.queue_offset), 0), INT32_MASK)
                        body = self._translator.body_of
                        found = await self._executor.run(body, record) if record.sys_flag & SYS_FLAG_COMPRESSED else body(record)
                        more_bytes = max(0, len(found[0]) - len(record.body))
                        if len(frame.body) + more_bytes > self._config.gateway_memory_max_bytes:  # there is never room for it
                            found, more_bytes = (record.body, self._v2.GZIP), 0
                        with self._clients.holding(client, more_bytes, len(frame.body)):
                            # without one that cannot be translated: it would come for ever
                            left = handles[:number] + handles[number + 1:]
                            message = self._translator.received(record, topic, found=found, handle=handles[number], attempt=attempt)
                            left = handles
                            await context.write(answer(message=message))
                    number = len(records)
            except Exception as error:  # the client has messages, which it drops if the stream ends with an error
                if not number:
                    raise
                if not isinstance(error, TooManyClientsError):
                    self._tell_failure(context, error)
            last = answer()
            set_time(last.delivery_timestamp, time.time_ns() // 1_000_000)
            await context.write(last)
            left = left[number:]
        finally:
            if left:
                self._background.begin(self._give_back(names, left))

    async def _give_back_late(self, names: tuple[str, str], popped: Awaitable[Frame]) -> None:
        """Give back what was popped for a call that its client has ended."""
        with contextlib.suppress(OSError):  # else their invisible time ends
            if (frame := await popped).code == codes.SUCCESS:
                await self._give_back(names, [self._translator.handle(record, frame.fields) for record in _records(frame)])

    async def _give_back(self, names: tuple[str, str], handles: list[str]) -> None:
        """Give back what did not reach its client, which may have left."""
        until_s = time.monotonic() + CALL_S
        with contextlib.suppress(EngineError):  # else their invisible time ends
            for handle in reversed(handles):  # the one that is given back last comes first
                await self._clients.own.ask(codes.GIVE_BACK, _handle_fields(*names, handle), until_s=until_s)

    async def _acknowledge(self, client: GrpcClient, request: Any, context: Any) -> Any:
        group, name = self._group(client, request.group), (await self._topic(client, request.topic))[0]
        if not 0 < len(request.entries) <= ENTRIES_MAX:
            raise CallRefusedError("BAD_REQUEST", f"an acknowledgement has 1 to {ENTRIES_MAX} entries")
        answer, until_s = self._v2.AckMessageResponse(), _until_s(context)

        async def one(entry: Any) -> Any:
            try:
                return self._status_of(await client.ask(
                    codes.ACK_MESSAGE, _handle_fields(group, name, entry.receipt_handle), until_s=until_s))
            except CallRefusedError as refused:
                return self._status(refused.code, str(refused))

        for entry, status in zip(request.entries, await asyncio.gather(*map(one, request.entries))):
            answer.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=status)
        self._sum_up(answer)
        return answer

    async def _change_invisible(self, client: GrpcClient, request: Any, context: Any) -> Any:
        group, name = self._group(client, request.group), (await self._topic(client, request.topic))[0]
        frame = await client.ask(codes.CHANGE_MESSAGE_INVISIBLETIME, {
            **_handle_fields(group, name, request.receipt_handle), "invisibleTime": str(_invisible_ms(request.invisible_duration, 0)),
        }, until_s=_until_s(context))
        physical = request.receipt_handle.split()[8:9]
        handle = " ".join([*frame.fields.get("extraInfo", request.receipt_handle).split()[:8], *physical])
        return self._v2.ChangeInvisibleDurationResponse(status=self._status_of(frame), receipt_handle=handle)

    async def _forward_to_dead_letters(self, client: GrpcClient, request: Any, context: Any) -> Any:
        group, name = self._group(client, request.group), (await self._topic(client, request.topic))[0]
        frame = await client.ask(codes.MAKE_DEAD_LETTER, _handle_fields(group, name, request.receipt_handle), until_s=_until_s(context))
        return self._v2.ForwardMessageToDeadLetterQueueResponse(status=self._status_of(frame))


def _options(config: EngineConfig) -> list[tuple[str, int]]:
    """Return the limits of connections as gRPC names them."""
    return [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", config.gateway_frame_max_bytes),
            ("grpc.max_send_message_length", -1), ("grpc.max_concurrent_streams", CALLS_OF_CONNECTION_MAX),
            # of those that wait to be given out: gRPC cancels others, whosever they are, by default beyond 1,000
            ("grpc.server.max_pending_requests", config.grpc_calls_max),
            ("grpc.server.max_pending_requests_hard_limit", config.grpc_calls_max),
            # after which it drops one of them, by default 30: after a restart all would be served too late for their clients
            ("grpc.server_max_unrequested_time_in_server", UNREQUESTED_S),
            ("grpc.max_allowed_incoming_connections", config.gateway_connections_max),
            ("grpc.max_connection_idle_ms", config.gateway_idle_timeout_ms),
            ("grpc.keepalive_time_ms", PING_S * 1000), ("grpc.keepalive_timeout_ms", PING_ANSWER_S * 1000),
            ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_ping_strikes", 0)]


def _check_size(size_bytes: int) -> None:
    if size_bytes > REQUEST_BYTES_MAX:
        raise CallRefusedError("PAYLOAD_TOO_LARGE", f"a request of {size_bytes} bytes beside messages' bodies: at most {REQUEST_BYTES_MAX}")


def _scheme(v2: Schema, host: str) -> int:
    with contextlib.suppress(ValueError):
        return int(v2.IPv6 if ipaddress.ip_address(host).version == 6 else v2.IPv4)
    return int(v2.DOMAIN_NAME)


def _until_s(context: Any, without: float = CALL_S) -> float:
    """Return until when a call must be answered, as `time.monotonic` counts."""
    left_s = context.time_remaining()
    return time.monotonic() + max(0.0, (without if left_s is None else min(left_s, DEADLINE_S_MAX)) - DEADLINE_S)


def _invisible_ms(duration: Any, least_ms: int = 1) -> int:
    found_ms = time_ms(duration)
    if not least_ms <= found_ms <= INVISIBLE_MS_MAX:
        raise CallRefusedError("ILLEGAL_INVISIBLE_TIME",
                               f"an invisible time of {found_ms} ms: {least_ms} to {INVISIBLE_MS_MAX} are possible")
    return found_ms


def _handle_fields(group: str, topic: str, handle: str) -> dict[str, str]:
    """Return the fields of a request about the message of a receipt handle; CallRefusedError for another text."""
    words = handle.split()
    if not 8 <= len(words) <= 9 or not (is_number(words[6]) and is_number(words[7])):
        raise CallRefusedError("INVALID_RECEIPT_HANDLE", f"{handle[:100]!r} is not a receipt handle")
    return {"consumerGroup": group, "topic": topic, "queueId": words[6], "offset": words[7], "extraInfo": handle}


def _records(frame: Frame) -> list[Message]:
    found, at = [], 0
    while at < len(frame.body):
        found.append(decode_record(frame.body, at))
        at += found[-1].size_bytes
    return found


def _tries(text: str) -> dict[tuple[int, int], int]:
    """Return how often messages of ordered queues were delivered already, by queue and offset: `0 qo3%17 2;...`."""
    found = {}
    for piece in text.split(";"):
        if (match := re.fullmatch(r"\d+ qo(\d+)%(\d+) (\d+)", piece)) is not None:
            found[int(match[1]), int(match[2])] = int(match[3])
    return found
