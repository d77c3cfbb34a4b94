"""``PerfettoWriter``: a timeline as Perfetto's protobuf trace, for ui.perfetto.dev and ``trace_processor``.

Events are ``TrackEvent``s on tracks of their own; names and repeated texts are interned, as the format foresees for
its size. The messages are those of the ``perfetto`` package (extra ``perfetto``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any, Final

from hicache_obs.errors import ConfigError
from hicache_obs.exporters.timeline import Args, Flow, plain_text

SEQUENCE: Final = 1
"""``trusted_packet_sequence_id``: interned names belong to a sequence, and one is enough."""
BATCH: Final = 1 << 11
"""Packets that are serialised together."""
MAX_INTERNED: Final = 1 << 13
"""Texts of one table; further ones are written out."""
MAX_TIME_NS: Final = (1 << 63) - 1


class PerfettoWriter:
    """Writes one file, in the order it is told; see ``TimelineWriter``. End it with ``close``.

    Args:
        file: Open for writing bytes; stays open.

    Raises:
        ConfigError: The ``perfetto`` package is too new for the protobuf that is installed.
        ModuleNotFoundError: It is not installed.
        OSError: By any method: the file cannot be written.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._pb = _messages()
        self._file = file
        self._trace = self._pb.Trace()
        self._interned: dict[tuple[str, str], int] = {}
        self._last_iid: dict[str, int] = {}
        first = self._packet()
        first.sequence_flags = self._pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        first.trace_packet_defaults.timestamp_clock_id = 6  # BUILTIN_CLOCK_BOOTTIME: times are shown as they are

    def group(self, number: int, parent: int, name: str, rank: int) -> None:
        """See ``TimelineWriter``."""
        descriptor = self._descriptor(number, parent, rank)
        descriptor.child_ordering = self._pb.TrackDescriptor.EXPLICIT
        if parent:
            descriptor.name = plain_text(name)
        else:
            descriptor.process.pid = rank + 1
            descriptor.process.process_name = plain_text(name)

    def track(self, number: int, group: int, name: str, rank: int, *, lane: int = 0) -> None:
        """See ``TimelineWriter``."""
        descriptor = self._descriptor(number, group, rank)
        descriptor.name = plain_text(name)
        # By key, not by name: two streams may have the same one, two lanes of a stream are one row.
        behavior = self._pb.TrackDescriptor.SIBLING_MERGE_BEHAVIOR_BY_SIBLING_MERGE_KEY
        descriptor.sibling_merge_behavior = behavior
        descriptor.sibling_merge_key = f"{group}/{rank}"

    def counter_track(self, number: int, group: int, name: str, rank: int, unit: str) -> None:
        """See ``TimelineWriter``."""
        descriptor = self._descriptor(number, group, rank)
        descriptor.name = plain_text(name)
        descriptor.counter.unit_name = unit

    def slice(
        self, track: int, name: str, category: str, start_ns: int, end_ns: int, args: Args, flows: Sequence[Flow] = ()
    ) -> None:
        """See ``TimelineWriter``."""
        self._begin(self._pb.TrackEvent.TYPE_SLICE_BEGIN, track, name, category, start_ns, args, flows)
        self._event(self._pb.TrackEvent.TYPE_SLICE_END, track, end_ns)

    def mark(self, track: int, name: str, category: str, at_ns: int, args: Args, flows: Sequence[Flow] = ()) -> None:
        """See ``TimelineWriter``."""
        self._begin(self._pb.TrackEvent.TYPE_INSTANT, track, name, category, at_ns, args, flows)

    def count(self, track: int, at_ns: int, value: int) -> None:
        """See ``TimelineWriter``."""
        self._event(self._pb.TrackEvent.TYPE_COUNTER, track, at_ns).counter_value = value

    def close(self) -> None:
        """Write what is left."""
        self._file.write(self._trace.SerializeToString())
        self._trace = self._pb.Trace()  # Clear() would keep its memory

    # -- packets ---------------------------------------------------------------------------------------------

    def _packet(self) -> Any:
        if len(self._trace.packet) >= BATCH:
            self.close()
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def _descriptor(self, number: int, parent: int, rank: int) -> Any:
        descriptor = self._packet().track_descriptor
        descriptor.uuid = number
        if parent:
            descriptor.parent_uuid = parent
        descriptor.sibling_order_rank = rank
        return descriptor

    def _event(self, kind: int, track: int, at_ns: int) -> Any:
        packet = self._packet()
        packet.timestamp = min(max(at_ns, 0), MAX_TIME_NS)
        packet.sequence_flags = self._pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event = packet.track_event
        event.type = kind
        event.track_uuid = track
        return event

    def _begin(
        self, kind: int, track: int, name: str, category: str, at_ns: int, args: Args, flows: Sequence[Flow]
    ) -> None:
        iids = self._intern("event_names", name), self._intern("event_categories", category)
        names = [self._intern("debug_annotation_names", key) for key in args]
        texts = [
            self._intern("debug_annotation_string_values", value) if isinstance(value, str) else 0
            for value in args.values()
        ]
        event = self._event(kind, track, at_ns)  # after the names it refers to
        if iids[0]:
            event.name_iid = iids[0]
        else:
            event.name = plain_text(name)
        event.category_iids.append(iids[1])
        for (key, value), named, text in zip(args.items(), names, texts, strict=True):
            annotation = event.debug_annotations.add()
            if named:
                annotation.name_iid = named
            else:
                annotation.name = plain_text(key)
            if not isinstance(value, str):
                annotation.int_value = value
            elif text:
                annotation.string_value_iid = text
            else:
                annotation.string_value = plain_text(value)
        event.flow_ids.extend([flow.number for flow in flows])

    def _intern(self, table: str, text: str) -> int:
        """The number of ``text`` in a table of the sequence; 0 if the table is full."""
        known = self._interned.get((table, text))
        if known is not None:
            return known
        iid = self._last_iid.get(table, 0) + 1
        if iid > MAX_INTERNED:
            return 0
        self._last_iid[table] = self._interned[table, text] = iid
        packet = self._packet()
        packet.sequence_flags = self._pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        entry = getattr(packet.interned_data, table).add()
        entry.iid = iid
        if table == "debug_annotation_string_values":
            entry.str = plain_text(text).encode()
        else:
            entry.name = plain_text(text)
        return iid


def _messages() -> Any:
    """The module with the generated messages."""
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ModuleNotFoundError:
        raise
    except Exception as error:  # noqa: BLE001 protobuf raises its own kind where it is older than the messages
        raise ConfigError(
            f"the package perfetto does not go with the protobuf that is installed ({error}); "
            "pip install --upgrade protobuf, or perfetto==0.16.0, or write Chrome JSON: -o NAME.json"
        ) from None
    return perfetto_trace_pb2
