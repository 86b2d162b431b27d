"""The recurrence in float64, in NumPy, one step at a time, and its derivative by hand: no code of
the package, and nothing to compile."""

from typing import NamedTuple

import numpy as np

MASKED = -1e6  # from there on a gate is closed
SEGMENT = 64  # the backward pass holds the states of so many steps, and recomputes others


def over(condition, y):
    """The condition with the axes of y behind its own."""
    return condition.reshape(condition.shape + (1,) * (np.ndim(y) - condition.ndim))


def select(condition, x, y):
    """Arrays of x where the condition holds, else those of y."""
    if condition.all():
        return x
    return [np.where(over(condition, a), a, b) for a, b in zip(x, y, strict=True)]


def scaled(factor, y):
    """factor * y, in which a factor of 0 makes 0 of anything."""
    product = over(factor, y) * y
    return product if factor.all() else np.where(over(factor == 0, y), 0, product)


def outer(a, b):
    return a[..., :, None] * b[..., None, :]


def dot(a, b):
    return np.sum(a * b, -1)


def times(c, v):
    """C v"""
    return (c @ v[..., None])[..., 0]


def log_sigmoid(y):
    return -np.logaddexp(0, -y)


class Step(NamedTuple):
    """What a step computes. before: c and n that it reads; carries: whether m is that of before."""

    before: list
    decay: np.ndarray
    gain: np.ndarray
    carries: np.ndarray
    state: list
    z: np.ndarray
    floor: np.ndarray
    size: np.ndarray


class Recurrence:
    """Arrays with the steps first, (S, B, NH, ...), in the order of the recurrence."""

    def __init__(self, x, masks, initial, options):
        """initial: c, n and m that enter, (B, N + 1, NH, ...), the last of them zeros."""
        self.masks, self.initial, self.entry = masks, initial, np.arange(len(masks.order))
        self.sigmoid = options.get("input_gate") == "sigmoid"
        self.normalize = options.get("normalize", True)
        self.eps, self.norm_val = options.get("eps", 1e-6), options.get("norm_val", 1.0)
        self.floor_of_m = options.get("stabilize_correctly", True) and not self.sigmoid
        self.q, self.k, self.v, self.i, self.f = (self.ordered(x[name]) for name in "qkvif")
        self.scale = self.q.shape[-1] ** -0.5
        self.log_f = np.where(self.f <= MASKED, -np.inf, log_sigmoid(self.f))
        log_i = log_sigmoid(self.i) if self.sigmoid else self.i
        self.log_i = np.where(self.i <= MASKED, -np.inf, log_i)

    def ordered(self, y):
        rows = zip(np.float64(y), self.masks.order, strict=True)
        return np.moveaxis(np.stack([row[:, at] for row, at in rows]), 2, 0)

    def in_memory(self, y):
        """Back in the order of the arrays, (B, NH, S, ...)."""
        result = np.zeros_like(y)
        for b, at in enumerate(self.masks.order):
            result[at, b] = y[:, b]
        return np.moveaxis(result, 0, 2)

    def step(self, t, state, saved):
        """The step t and what is saved behind it."""
        state = saved if self.masks.back[t] else state
        enter = self.masks.start[:, t]
        c, n, m = state
        if (enter >= 0).any():
            c, n, m = select(enter >= 0, [y[self.entry, enter] for y in self.initial], state)
        carried = self.log_f[t] + m
        new = m if self.sigmoid else np.maximum(carried, self.log_i[t])
        safe = np.where(new == -np.inf, 0, new)
        decay, gain = np.exp(carried - safe), np.exp(self.log_i[t] - safe)
        stored = gain[..., None] * self.k[t]
        after = [scaled(decay, c), scaled(decay, n) + stored]
        after[0] += outer(stored, self.v[t])
        z = self.scale * dot(self.q[t], after[1])
        floor = self.norm_val * (np.exp(-safe) if self.floor_of_m else np.ones(z.shape))
        if self.floor_of_m and self.norm_val:
            floor = np.where(new == -np.inf, np.inf, floor)
        size = np.maximum(abs(z), floor) + self.eps if self.normalize else np.ones(z.shape)
        state = [*after, new]
        step = Step([c, n], decay, gain, carried > self.log_i[t], state, z, floor, size)
        return step, select(self.masks.keep[:, t], state, saved)

    def forward(self):
        """h, (S, B, NH, DHV), and the states that leave, (B, N, NH, ...)."""
        saved = state = [y[:, 0] for y in self.initial]
        ends, h = self.masks.ends, np.zeros(self.v.shape)
        of = np.minimum(np.arange(ends.shape[1]), self.initial[0].shape[1] - 1)
        last, self.checkpoints = [y[:, of].copy() for y in self.initial], []
        for t in range(len(self.q)):
            if t % SEGMENT == 0:
                self.checkpoints.append((state, saved))
            step, saved = self.step(t, state, saved)
            state = step.state
            h[t] = self.scale * times(np.swapaxes(state[0], -1, -2), self.q[t])
            h[t] /= step.size[..., None]
            for b, n in zip(*np.nonzero(ends == t + 1), strict=True):
                for y, z in zip(last, saved, strict=True):
                    y[b, n] = z[b]
        self.read = self.masks.read.T[:, :, None, None]
        return np.where(self.read, h, 0), last

    def steps_of(self, number):
        """The steps of a segment, computed again."""
        (state, saved), result = self.checkpoints[number], []
        for t in range(number * SEGMENT, min((number + 1) * SEGMENT, len(self.q))):
            step, saved = self.step(t, state, saved)
            state = step.state
            result.append(step)
        return result

    def backward(self, h, dh, d_last, noise=0):
        """Gradients of q, k, v, i and f, (S, B, NH, ...), and of the initial states.

        noise: of h in dh . h, relative.
        """
        dh, noisy = np.where(self.read, self.ordered(dh), 0), h * (1 + noise)
        d = [np.zeros_like(y[:, 0]) for y in self.initial]
        d_initial = [np.zeros_like(y) for y in self.initial]
        result = [np.zeros_like(y) for y in (self.q, self.k, self.v, self.i, self.f)]
        for number in reversed(range(len(self.checkpoints))):
            for place, step in reversed([*enumerate(self.steps_of(number))]):
                t = number * SEGMENT + place
                for b, n in zip(*np.nonzero(self.masks.ends == t + 1), strict=True):
                    for y, z in zip(d, d_last, strict=True):
                        y[b] += z[b, n]
                keep, enter = self.masks.keep[:, t], self.masks.start[:, t]
                kept = [scaled(keep, y) for y in d]
                gradients, before = self.step_backward(t, step, kept, dh[t], noisy[t])
                for y, z in zip(result, gradients, strict=True):
                    y[t] = z
                d = select(keep, before, d)
                for y, z in zip(d, d_initial, strict=True):
                    for b in np.flatnonzero((enter >= 0) & keep):
                        z[b, enter[b]] += y[b]
                        y[b] = 0
        for y, z, given in zip(d, d_initial, d_last, strict=True):
            z[:, 0] += y
            for b, n in zip(*np.nonzero(self.masks.ends < 0), strict=True):
                z[b, n] += given[b, n]
        return result, d_initial

    def step_backward(self, t, step, d_state, dh, h):
        """Gradients of a step's q, k, v, i and f, and of the states before it."""
        (c0, n0), (c, n, _), (dc, dn, dm) = step.before, step.state, d_state
        q, k, v = self.scale * self.q[t], self.k[t], self.v[t]
        dnum, dz = dh / step.size[..., None], np.zeros(step.z.shape)
        if self.normalize:
            d_size = -dot(dh, h) / step.size
            dz = np.where(abs(step.z) >= step.floor, np.sign(step.z) * d_size, 0)
            if self.floor_of_m:
                on_floor = (abs(step.z) < step.floor) & np.isfinite(step.floor)
                dm = dm - np.where(on_floor, step.floor * d_size, 0)
        dc, dn = dc + outer(q, dnum), dn + q * dz[..., None]
        dq = self.scale * (times(c, dnum) + n * dz[..., None])
        of_k = times(dc, v) + dn
        dk = step.gain[..., None] * of_k
        dv = step.gain[..., None] * times(np.swapaxes(dc, -1, -2), k)
        di = step.gain * dot(k, of_k)
        carried = step.decay * (np.einsum("...kv,...kv", dc, c0) + dot(dn, n0))
        if not self.sigmoid:
            dm = dm - di - carried
            di = di + np.where(step.carries, 0, dm)
            carried = carried + np.where(step.carries, dm, 0)
        di = di * np.exp(log_sigmoid(-self.i[t])) if self.sigmoid else di
        di = np.where(self.log_i[t] == -np.inf, 0, di)
        carried = np.where(self.log_f[t] == -np.inf, 0, carried)
        df = carried * np.exp(log_sigmoid(-self.f[t]))
        return (dq, dk, dv, di, df), [over(step.decay, dc) * dc, over(step.decay, dn) * dn, carried]
