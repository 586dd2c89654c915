"""The hours, money and energy that a run takes."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True)
class Bill:
    """The time, energy and money of a run over so many tokens.

    Attributes:
        hours: from its start to its end.
        device_hours: of all devices.
        money: in the currency of the price; None: no price was given.
        kwh: kilowatt-hours; None: no watts were given.
    """

    hours: float
    device_hours: float
    money: float | None
    kwh: float | None

    @classmethod
    def of(
        cls, tokens: float, tokens_per_s: float, devices: int, price: float | None, watts: float | None
    ) -> Bill:
        """Return the bill of a run.

        Args:
            tokens: of the whole run.
            price: of an hour of one device.
            watts: that one device draws, with its share of the node.
        """
        hours = tokens / tokens_per_s / HOUR_S
        device_hours = hours * devices
        money = None if price is None else device_hours * price
        return cls(hours, device_hours, money, None if watts is None else device_hours * watts / 1000)

    @property
    def in_words(self) -> str:
        parts = [f"{self.hours:,.3g} hours", f"{self.device_hours:,.4g} device-hours"]
        if self.money is not None:
            parts.append(f"{self.money:,.2f} at that price")
        if self.kwh is not None:
            parts.append(f"{self.kwh:,.4g} kWh")
        return ", ".join(parts)
