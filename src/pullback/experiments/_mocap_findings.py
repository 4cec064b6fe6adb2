"""What the motion capture experiment found, next to what the paper says."""

from __future__ import annotations

from typing import Any

from pullback.experiments._report import Finding


def findings(numbers: dict[str, Any]) -> list[Finding]:
    """The statements of the report."""
    both, stride, kl = numbers["opposite_stride_and_heading"], numbers["opposite_stride"], numbers["kl"]
    path, line, faded = (both["routes"][route] for route in ("recommended", "line", "reweighted"))
    return [
        Finding(
            "Decoded shortest paths are plausible poses",
            "consistently meaningful poses; the straight line becomes implausible (one picked pair)",
            f"distance to the nearest recorded pose {both['lower']:.0%} lower than along the line, over {both['pairs']} pairs "
            f"({both['nearer_pairs']} of them nearer); sampled as in the paper {both['sampled_lower']:.0%} lower",
            "" if both["lower"] >= 0.3 else "less than 30 % lower",
        ),
        Finding(
            "The same for pairs half a stride apart, whatever their heading",
            "not distinguished",
            f"{stride['lower']:.0%} lower ({stride['nearer_pairs']} of {stride['pairs']} pairs nearer), sampled {stride['sampled_lower']:.0%}",
            "pairs that face nearly the same way have few codes between them that a line could miss",
        ),
        Finding(
            "Motion along shortest paths is smooth",
            "not measured",
            f"unevenness of the angular step {path['unevenness']:.2f} against {line['unevenness']:.2f}; smoother in "
            f"{both['smoother_pairs']} of {both['pairs']} pairs; mean step {path['step']:.4f} against {line['step']:.4f} rad",
        ),
        Finding(
            "Paths follow the trend of the data",
            "with concentrations that fade to 0.1",
            f"points off the data: {path['outside']:.0%} (Extrapolated), {faded['outside']:.0%} (reweighting), {line['outside']:.0%} (lines)",
            "reweighting leaves short cuts, since bones without a direction are all alike; its paths "
            f"were solved with few steps only, and {faded['converged']} of {faded['pairs']} converged"
            if faded["outside"] > path["outside"]
            else "",
        ),
        Finding(
            "Divergence of von Mises–Fisher",
            "no closed form; Monte Carlo",
            f"closed form; {kl['num_samples']} plain samples miss it by {kl['plain_relative_error']:.1%} (median), {kl['plain_negative']:.1%} "
            f"negative; pullback.divergences.monte_carlo_kl by {kl['balanced_relative_error']:.1%}, none negative",
            "there is a closed form on the sphere in space",
        ),
    ]
