"""The time, cost and energy of a run."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True)
class Bill:
    """The time, energy and cost of a run over a number of tokens.

    Attributes:
        hours: wall-clock hours.
        device_hours: hours summed over all devices.
        money: cost in the currency of the price; None without a price.
        kwh: kilowatt-hours; None without a power.
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
            tokens: total tokens of the run.
            price: price of one device-hour.
            watts: power draw of one device, including its share of the node.
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
