"""Access control of the gateway: RocketMQ's access list at the broker's ports.

The list is a `plain_acl.yml` as RocketMQ 4.9.8 reads it. A request to the broker needs the access key of an account and a
signature with its secret (HMAC-SHA1 over the header's fields in order and the body), or comes from an address in the
list; the account's rights must cover its topic and its group. The name server needs no key, as in RocketMQ, except for changes.
The signature covers neither the code nor the names of the fields: without TLS whoever overhears a request can send another one
with it, so an account may be for TLS only.

The file is checked every second; a new one applies to later requests. Docs: docs/gateway.md, docs/security.md.
"""

from __future__ import annotations

import base64
import hmac
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyengine.engine_config import EngineConfig
from pyengine.errors import EngineError
from pyengine.events import Event, Report
from pyengine.formats.small_file import file_stamp, open_private
from pyengine.gateway import acl_file, codes
from pyengine.gateway.acl_file import LIST_BYTES_MAX, NOTHING, PUB, SUB, AccessError, Account, Rules, change_list, read_rules
from pyengine.gateway.connections import Answer, Handler, Handlers, Request, RequestRefusedError, Require, TurnExecutor
from pyengine.gateway.names import RETRY_PREFIX, TRACE_TOPIC, Address
from pyengine.gateway.wire import Frame, WireError, read_json, read_object, write_json
from pyengine.storage.durable_file import exclusive
from pyengine.storage.durable_writes import LOCK_MODE, write_config

UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"

_FAILED = {  # RocketMQ's code of a failed change of the list, by the change's code
    codes.UPDATE_AND_CREATE_ACL_CONFIG: codes.UPDATE_AND_CREATE_ACL_CONFIG_FAILED,
    codes.DELETE_ACL_CONFIG: codes.DELETE_ACL_CONFIG_FAILED,
    codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED}
_ADMIN_CODES = frozenset((codes.UPDATE_AND_CREATE_TOPIC, codes.UPDATE_BROKER_CONFIG, codes.DELETE_TOPIC_IN_BROKER,
                          codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, codes.DELETE_SUBSCRIPTIONGROUP,
                          codes.SET_MESSAGE_REQUEST_MODE, *_FAILED))
# Changes at the name server, whose other requests need no key.
NAME_SERVER_CODES = frozenset((
    codes.REGISTER_BROKER, codes.UNREGISTER_BROKER, codes.DELETE_TOPIC_IN_NAMESRV, codes.WIPE_WRITE_PERM_OF_BROKER,
    codes.ADD_WRITE_PERM_OF_BROKER, codes.PUT_KV_CONFIG, codes.DELETE_KV_CONFIG, codes.UPDATE_NAMESRV_CONFIG))
_POP_CODES = frozenset((codes.POP_MESSAGE, codes.NOTIFICATION, codes.ACK_MESSAGE, codes.CHANGE_MESSAGE_INVISIBLETIME,
                        codes.MAKE_DEAD_LETTER))
_REPLY_CODES = frozenset((codes.SEND_REPLY_MESSAGE, codes.SEND_REPLY_MESSAGE_V2))
# By code, the fields of the header that name a topic, with the right to it that the request needs, and a group.
_FIELDS = {
    **dict.fromkeys((codes.SEND_MESSAGE, codes.SEND_REPLY_MESSAGE), ("topic", PUB, "")),
    **dict.fromkeys((codes.SEND_MESSAGE_V2, codes.SEND_BATCH_MESSAGE, codes.SEND_REPLY_MESSAGE_V2), ("b", PUB, "")),
    **dict.fromkeys((codes.PULL_MESSAGE, codes.LITE_PULL_MESSAGE, codes.UPDATE_CONSUMER_OFFSET, *_POP_CODES),
                    ("topic", SUB, "consumerGroup")),
    **dict.fromkeys((codes.UNREGISTER_CLIENT, codes.GET_CONSUMER_LIST_BY_GROUP, codes.GET_CONSUMER_RUNNING_INFO,
                     codes.CONSUME_MESSAGE_DIRECTLY), ("", SUB, "consumerGroup")),
    **dict.fromkeys((codes.CONSUMER_SEND_MSG_BACK, codes.INVOKE_BROKER_TO_RESET_OFFSET), ("", SUB, "group")),
    codes.QUERY_MESSAGE: ("topic", SUB, ""), codes.CLONE_GROUP_OFFSET: ("", SUB, "destGroup")}
_EXCEPTION = "org.apache.rocketmq.acl.common.AclException: "


class AccessList:
    """Checks each request by the rules of a `plain_acl.yml`; it refuses every request until the file can be read."""

    FAILURE = "the access list cannot be used (a broken one changes nothing, without one every client is refused)"

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig) -> None:
        self._path = Path(root) / config.gateway_acl_file
        self._reply_topic = f"{config.broker_cluster_name}_REPLY_TOPIC"
        self._rules = Rules()
        self._stamp: tuple[int, ...] = ()
        self._fault: AccessError | None = None
        self._lock = threading.RLock()

    def reload(self) -> str:
        """Read the file if it has changed; return a sentence for the log if it was read. AccessError while it cannot be used.

        Without a readable file all requests are refused; with one that cannot be parsed the previous rules apply."""
        with self._lock:
            try:
                with open_private(self._path, "the gateway's access list", "gateway_acl_file", AccessError) as file:
                    stamp = file_stamp(os.fstat(file.fileno()))
                    content = file.read(LIST_BYTES_MAX + 1) if stamp != self._stamp else None
            except OSError as error:
                self._rules, self._stamp = Rules(), ()
                raise AccessError(f"the access list in {self._path} cannot be read: {error.strerror} (gateway_acl_file)") from None
            if content is None:
                if self._fault is not None:
                    raise self._fault
                return ""
            self._stamp = stamp
            try:
                self._rules = read_rules(content, stamp[0] // 1_000_000)
                self._fault = None
            except AccessError as error:
                self._fault = AccessError(f"the access list in {self._path} is not used: {error}")
                raise self._fault from None
            rules = self._rules
            ignored = f"; unknown keys are ignored: {', '.join(rules.unknown)[:200]}" if rules.unknown else ""
            return (f"the access list in {self._path} counts: {len(rules.accounts)} accounts, {len(rules.white)} addresses that need none"
                    f"{ignored}")

    def guard(self, handler: Handler, report: Callable[[str, str], None]) -> Handler:
        """Return a handler that checks each request, and calls the given one for those that are allowed."""
        def guarded(request: Request) -> Any:
            asker = request.connection
            _refuse_if(self.fault(request.frame, asker.host, asker.is_secure, is_signed=asker.is_local), request, report)
            return handler(request)

        return guarded

    def requirement(self, report: Callable[[str, str], None]) -> Require:
        """Return a function that checks the rights of a request that is allowed otherwise, for a topic that its header does not name."""
        def require(request: Request, topic: str, right: int) -> None:
            frame = request.frame
            _refuse_if(self.topic_fault(frame.fields.get("AccessKey"), request.connection.host, frame.code, topic, right), request, report)

        return require

    def topic_fault(self, key: str | None, host: str, code: int, topic: str, right: int) -> str:
        """Return why a client from this address, whose key is known to be its own, lacks a right for a topic, "" if it has it.
        Thread-safe."""
        account = self._account(key, host)
        if isinstance(account, str):  # it may have been deleted since
            return account
        return "" if account.white.match(host) else _missing_right(account, code, {topic: right})

    def fault(self, frame: Frame, host: str, is_secure: bool = False, *, is_signed: bool = False) -> str:
        """Return RocketMQ's sentence why a request from this address is refused, "" if it is allowed. `is_signed`: a worker of this
        engine has checked the signature."""
        key = frame.fields.get("AccessKey")
        account = self._account(key, host)
        if isinstance(account, str):
            return account
        if account.tls_only and not is_secure:
            return f"accessKey={key} is for connections with TLS only"
        if account.white.match(host) and (account.is_admin or frame.code not in _FAILED):
            return ""
        if not (is_signed or _is_signed(frame, account.secret)):
            return f"Check signature failed for accessKey={key}"
        try:
            needed = self._needed(frame)
        except WireError as error:
            return str(error)
        if needed.get(TRACE_TOPIC) == PUB:
            return ""
        return _missing_right(account, frame.code, needed)

    def call_fault(self, key: str, signed: str, signature_hex: str, host: str) -> str:
        """Return why a call of RocketMQ 5 from this address is not its account's, "" if it is: it signs its time alone."""
        account = self._account(key or None, host)
        if isinstance(account, str):
            return account
        right = hmac.digest(account.secret, signed.encode(), "sha1").hex()
        if not account.white.match(host) and not hmac.compare_digest(right.encode(), signature_hex.lower().encode()):
            return f"Check signature failed for accessKey={key}"
        return ""

    def _account(self, key: str | None, host: str) -> Account | str:
        """Return the account of an access key, or why there is none: "" for an address that needs none."""
        rules = self._rules
        if any(addresses.match(host) for addresses in rules.white):
            return ""
        return "No accessKey is configured" if key is None else rules.accounts.get(key) or f"No acl config for {key}"

    def _needed(self, frame: Frame) -> dict[str, int]:
        """Return the rights that a request needs, by topic and by retry topic for a group.

        As RocketMQ's PlainAccessValidator, but a batch needs the right of its topic like a single message, a message to a retry
        topic needs that of the group, a reply needs the right of its topic, unless that is the cluster's topic for replies, and
        locks, offsets, and what a member is asked need that of the group."""
        code, fields = frame.code, frame.fields
        needed: dict[str, int] = {}

        def needs(topic: object, right: int) -> None:
            if isinstance(topic, str) and topic:
                needed[topic] = right

        def needs_group(group: object) -> None:
            if isinstance(group, str) and group:
                needed[RETRY_PREFIX + group] = SUB

        topic_field, right, group_field = _FIELDS.get(code, ("", SUB, ""))
        topic = fields.get(topic_field, "")
        is_of_retries = topic.startswith(RETRY_PREFIX)
        if not (is_of_retries and code in _POP_CODES or topic == self._reply_topic and code in _REPLY_CODES):  # a handle's is the group's
            needs(topic, SUB if is_of_retries else right)
        needs_group(fields.get(group_field))
        if code in (codes.LOCK_BATCH_MQ, codes.UNLOCK_BATCH_MQ):
            needs_group(read_object(frame.body).get("consumerGroup"))
        elif code == codes.HEART_BEAT:
            document = read_json(frame.body)
            for consumer in _rows(document, "consumerDataSet"):
                needs_group(consumer.get("groupName"))
                for subscription in _rows(consumer, "subscriptionDataSet"):
                    needs(subscription.get("topic"), SUB)
        return needed

    def change(self, edit: Callable[[dict[str, Any]], None]) -> str:
        """Change the file durably and apply it before this returns; return reload()'s sentence. `edit` changes the document.

        AccessError if the new content would be wrong, or the present one cannot be parsed; also exceptions of `edit`. The file does
        not change then. DiskFullError, DiskError or FlushError.
        """
        path = Path(os.path.realpath(self._path))
        with exclusive(path), self._lock:
            try:
                with open_private(path, "the gateway's access list", "gateway_acl_file", AccessError) as file:
                    content, owner = file.read(LIST_BYTES_MAX + 1), os.fstat(file.fileno())
            except OSError as error:
                raise AccessError(f"the access list in {path} cannot be read: {error.strerror} (gateway_acl_file)") from None
            write_config(path, change_list(content, edit), keep_backup=False, mode=LOCK_MODE, owner=owner)
            return self.reload()

    def handlers(self, address: Address, executor: TurnExecutor, report: Report) -> Handlers:
        """Return handlers for mqadmin's clusterAclConfigVersion, updateAclConfig, deleteAclConfig and updateGlobalWhiteAddr."""
        async def change(request: Request, what: str, edit: Callable[[dict[str, Any]], None]) -> Answer:
            try:
                sentence = await executor.run(self.change, edit)
            except EngineError as error:
                return Answer(_FAILED[request.frame.code], str(error))
            key = request.frame.fields.get("AccessKey", "without an access key")
            report(Event.GATEWAY_ACCESS, f"client {request.connection.host} ({printable(key)}) has changed {printable(what)}: {sentence}")
            return Answer()

        async def put_account(request: Request) -> Answer:
            fields = request.frame.fields
            return await change(request, f"the account {fields.get('accessKey')}",
                                lambda document: acl_file.put_account(document, fields))

        async def delete_account(request: Request) -> Answer:
            key = request.frame.fields.get("accessKey", NOTHING)
            return await change(request, f"the account {key}", lambda document: acl_file.delete_account(document, key))

        async def put_addresses(request: Request) -> Answer:
            text, named = request.frame.fields.get("globalWhiteAddrs"), request.frame.fields.get("aclFileFullPath")
            own = (str(self._path), os.path.abspath(self._path), os.path.realpath(self._path))
            if text is None or named and named not in own:
                return Answer(codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED,
                              f"The globalWhiteAddresses[{text or NOTHING}] has been updated failed. (the access list is {self._path})")
            return await change(request, "the addresses that need no key", lambda document: acl_file.put_addresses(document, text))

        def version(request: Request) -> Answer:
            version_text = write_json(self._rules.version).decode()
            return Answer(fields={"version": version_text, "allAclFileVersion": write_json({str(self._path): self._rules.version}).decode(),
                                  "brokerName": address.broker_name, "brokerAddr": address.broker, "clusterName": address.cluster})

        return {codes.GET_BROKER_CLUSTER_ACL_INFO: version, codes.UPDATE_AND_CREATE_ACL_CONFIG: put_account,
                codes.DELETE_ACL_CONFIG: delete_account, codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: put_addresses}


def without_list() -> Handlers:
    """Return handlers that refuse changes of the list without `acl_enable`, with RocketMQ's codes (which has no sentence)."""
    def refuse(request: Request) -> Answer:
        return Answer(_FAILED[request.frame.code], "there is no access list to change: acl_enable is off")

    return dict.fromkeys(_FAILED, refuse)


def printable(text: str, chars_max: int = 100) -> str:
    """Return a client's text in a form that is safe for the log."""
    return "".join(sign if sign.isprintable() else "?" for sign in text[:chars_max])


def _refuse_if(fault: str, request: Request, report: Callable[[str, str], None]) -> None:
    if fault:
        report(request.connection.host, f"request {request.frame.code} is refused: {fault}")
        raise RequestRefusedError(codes.SYSTEM_ERROR, _EXCEPTION + fault)


def _is_signed(frame: Frame, secret: bytes) -> bool:
    """Return whether the frame has the signature of this secret. RocketMQ's client 4.9.8 signs `_UNIQUE_KEY_QUERY`, older
    ones and the broker leave it out: both are accepted."""
    fields = frame.fields
    given = fields.get("Signature", "").encode("utf-8", "replace")
    names = sorted(fields.keys() - {"Signature", UNIQUE_KEY_QUERY})
    if hmac.compare_digest(signature([fields[name] for name in names], frame.body, secret), given):
        return True
    if UNIQUE_KEY_QUERY not in fields:
        return False
    names = sorted((*names, UNIQUE_KEY_QUERY))
    return hmac.compare_digest(signature([fields[name] for name in names], frame.body, secret), given)


def signature(values: list[str], body: bytes, secret: bytes) -> bytes:
    """Return RocketMQ's signature of a request; `values` are the header's fields, in the order of their names."""
    return base64.b64encode(hmac.digest(secret, "".join(values).encode("utf-8", "replace") + body, "sha1"))


def _missing_right(account: Account, code: int, needed: Mapping[str, int]) -> str:
    """Return RocketMQ's sentence about the first missing right, "" if the account has all."""
    if code in _ADMIN_CODES | NAME_SERVER_CODES and not account.is_admin:
        return f"Need admin permission for request code={code}, but accessKey={account.access_key} is not"
    if account.is_admin and not account.rights:
        return ""
    for name, right in needed.items():
        is_group = name.startswith(RETRY_PREFIX)
        if not right & account.rights.get(name, account.group_rights if is_group else account.topic_rights):
            shown = f"group:{name.removeprefix(RETRY_PREFIX)}" if is_group else f"topic:{name}"
            return f"No default permission for {shown}"
    return ""


def _rows(document: object, name: str) -> list[dict[str, object]]:
    found = document.get(name) or [] if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise WireError(f"a heartbeat whose {name} is not a list of objects")
    return found
