"""Which worker holds which key.

Theory. A holder set is one integer, bit k standing for index slot k. "Who holds all of these keys" is then an
AND, a few tens of nanoseconds for a thousand workers, and the whole index is bytes and integers, which the
garbage collector never walks. Four decisions follow from wanting no operation to stall the event loop:

* The table is 256 dictionaries, chosen by the key's last byte, not one. A dictionary of a million keys takes
  tens of milliseconds to grow and cannot be walked in slices while it changes; four thousand keys take neither.
* Forgetting all that a worker holds does not touch the table. Its slot is *retired*: nobody asks for that bit any
  more, and `sweep` strikes it out in slices. A slot is given out again only after a whole sweep has passed over
  every key since its retirement, so a stale bit never speaks for a new owner.
* A whole new set (a snapshot) is written under a fresh slot, which nobody asks for yet; the owner then moves over
  in one step (`Pool`), and the old slot is retired. No reader sees half a set.
* There is no list of keys per worker: count and digest are kept as the bits change, and both are exact whatever
  is added twice or removed in vain.

Equal holder sets share one integer object where that is cheap to arrange (`_share`), because an integer with bit
999 set takes 160 bytes. The sharing table is direct-mapped by the remainder modulo a safe prime: Python's own hash of
an integer is its remainder modulo 2**61 - 1, under which 2**k and 2**(k + 61) collide, and holder sets are made of such
numbers. When a remainder is taken by another set the newer one replaces it; sharing is lost, truth is not. The table
has a fixed size because a dictionary in its place would stall while it grows or is emptied (2 ms were seen).
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest as key_hash  # the same rule as fullhit_publisher.keys.key_hash; a test says so

from .types import Key

__all__ = ["Index"]

_SHARDS = 256
_SHARE_PLACES = 65267  # a prime p with (p - 1) / 2 prime too, so that the order of 2 is near p; 0.5 MB of places


class Index:
    """Keys and their holders. Slots are taken with `allocate` and given back with `retire`.

    `max_keys`          distinct keys held at once (keys that wait for the sweep count)
    `max_keys_per_slot` keys one slot may hold
    A key over a limit is not taken and counted: `refused_slot`, `refused_total`; the slot is marked in `truncated`.
    """

    def __init__(self, max_keys: int, max_keys_per_slot: int) -> None:
        self.max_keys = max_keys
        self.max_keys_per_slot = max_keys_per_slot
        self.shards: list[dict[Key, int]] = [{} for _ in range(_SHARDS)]
        self.keys = 0
        self.entries = 0  # (key, slot) pairs of slots in use
        self.bits: list[int] = []
        self.counts: list[int] = []
        self.digests: list[int] = []
        self.truncated: list[bool] = []
        self.retired = 0  # mask of slots whose bits may still be in the table
        self.refused_slot = 0
        self.refused_total = 0
        self._free = 0
        self._shared = [0] * _SHARE_PLACES
        self._sweeping = 0  # retired slots this pass strikes out
        self._sweep_shard = 0
        self._sweep_keys: list[Key] | None = None
        self._sweep_at = 0

    # -- slots

    def allocate(self) -> int:
        """A slot that no key knows: the lowest free one, so that masks stay short."""
        free = self._free
        if free:
            bit = free & -free
            self._free = free ^ bit
            slot = bit.bit_length() - 1
        else:
            slot = len(self.bits)
            self.bits.append(1 << slot)
            self.counts.append(0)
            self.digests.append(0)
            self.truncated.append(False)
        self.counts[slot] = 0
        self.digests[slot] = 0
        self.truncated[slot] = False
        return slot

    def retire(self, slot: int) -> None:
        """Give a slot back. Its keys are gone for everyone who no longer asks for its bit."""
        if self.counts[slot]:
            self.retired |= self.bits[slot]
        else:
            self._free |= self.bits[slot]
        self.entries -= self.counts[slot]
        self.counts[slot] = 0
        self.digests[slot] = 0

    @property
    def slots(self) -> int:
        """Slots that exist, in use or not: the width of the masks."""
        return len(self.bits)

    # -- changes

    def add(self, slot: int, keys: Iterable[Key]) -> None:
        """Note that `slot` holds `keys`. Known ones change nothing; those over a limit are refused and counted."""
        shards = self.shards
        share = self._share
        bit = self.bits[slot]
        digest = self.digests[slot]
        room = room_before = self.max_keys_per_slot - self.counts[slot]
        space = space_before = self.max_keys - self.keys
        last = last_joined = 0  # neighbours in a message are often held by the same others
        try:
            for key in keys:
                shard = shards[key[15]]
                mask = shard.get(key)
                if mask is None:
                    if room <= 0 or space <= 0:
                        self._refuse(slot, room <= 0)
                        continue
                    shard[key] = bit
                    space -= 1
                elif mask & bit:
                    continue
                else:
                    if room <= 0:
                        self._refuse(slot, True)
                        continue
                    if mask is not last:
                        last, last_joined = mask, share(mask | bit)
                    shard[key] = last_joined
                room -= 1
                digest ^= key_hash(key)
        finally:
            self.digests[slot] = digest
            self.counts[slot] += room_before - room
            self.entries += room_before - room
            self.keys += space_before - space

    def remove(self, slot: int, keys: Iterable[Key]) -> None:
        """Note that `slot` no longer holds `keys`. Those it never held change nothing."""
        shards = self.shards
        share = self._share
        bit = self.bits[slot]
        digest = self.digests[slot]
        gone = dropped = 0
        try:
            for key in keys:
                shard = shards[key[15]]
                mask = shard.get(key, 0)
                if mask & bit:
                    rest = mask ^ bit
                    if rest:
                        shard[key] = share(rest)
                    else:
                        del shard[key]
                        dropped += 1
                    gone += 1
                    digest ^= key_hash(key)
        finally:
            self.digests[slot] = digest
            self.counts[slot] -= gone
            self.entries -= gone
            self.keys -= dropped

    def _refuse(self, slot: int, by_slot: bool) -> None:
        self.truncated[slot] = True
        if by_slot:
            self.refused_slot += 1
        else:
            self.refused_total += 1

    def _share(self, mask: int) -> int:
        place = mask % _SHARE_PLACES
        known = self._shared[place]
        if known == mask:
            return known
        self._shared[place] = mask
        return mask

    # -- reading

    def mask(self, key: Key) -> int:
        """Bits of all slots under which the key is filed; bits of retired slots may be among them."""
        return self.shards[key[15]].get(key, 0)

    def holds(self, slot: int, key: Key) -> bool:
        return bool(self.mask(key) & self.bits[slot])

    # -- sweeping

    def sweep(self, budget: int) -> bool:
        """Visit up to `budget` keys and strike out retired slots; True while there is more to do."""
        dead = self._sweeping
        if not dead:
            dead = self._sweeping = self.retired
            if not dead:
                return False
            self._sweep_shard = 0
            self._sweep_keys = None
        while budget > 0:
            shard = self.shards[self._sweep_shard]
            if self._sweep_keys is None:
                self._sweep_keys = list(shard)
                self._sweep_at = 0
            start = self._sweep_at
            self._sweep_at = start + budget
            chunk = self._sweep_keys[start : start + budget]
            self._strike(shard, chunk, dead)
            budget -= len(chunk) + 1  # an empty shard costs something too
            if self._sweep_at < len(self._sweep_keys):
                break
            if len(shard) * 4 < len(self._sweep_keys):
                self.shards[self._sweep_shard] = dict(shard)  # dictionaries do not shrink by themselves
            self._sweep_keys = None
            self._sweep_shard += 1
            if self._sweep_shard == _SHARDS:
                self._sweeping = 0
                self.retired ^= dead
                self._free |= dead
                return bool(self.retired)
        return True

    def _strike(self, shard: dict[Key, int], keys: list[Key], dead: int) -> None:
        share = self._share
        dropped = 0
        for key in keys:
            mask = shard.get(key, 0)
            hit = mask & dead
            if hit:
                rest = mask ^ hit
                if rest:
                    shard[key] = share(rest)
                else:
                    del shard[key]
                    dropped += 1
        self.keys -= dropped
