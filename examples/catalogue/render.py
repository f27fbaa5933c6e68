"""Ray tracer of three spheres over a plane; writes a PPM image. Standard library only.

Many tasks render one image: each takes a band of rows, and the bands are written one after another.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

Vector = tuple[float, float, float]
SPHERES: list[tuple[Vector, float, Vector]] = [
    ((-1.1, 0.5, 4.0), 0.5, (0.9, 0.3, 0.2)),
    ((0.0, 0.7, 4.6), 0.7, (0.2, 0.7, 0.4)),
    ((1.2, 0.4, 3.6), 0.4, (0.3, 0.4, 0.9)),
]
LIGHT: Vector = (-0.5, 0.8, -0.35)


def dot(a: Vector, b: Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def along(start: Vector, way: Vector, length: float) -> Vector:
    return (start[0] + way[0] * length, start[1] + way[1] * length, start[2] + way[2] * length)


def unit(a: Vector) -> Vector:
    size = math.sqrt(dot(a, a))
    return (a[0] / size, a[1] / size, a[2] / size)


def hit(start: Vector, way: Vector) -> tuple[float, Vector, Vector] | None:
    """Distance, normal and colour of the nearest surface."""
    nearest: tuple[float, Vector, Vector] | None = None
    for centre, radius, colour in SPHERES:
        to = (centre[0] - start[0], centre[1] - start[1], centre[2] - start[2])
        middle = dot(to, way)
        inside = radius * radius - dot(to, to) + middle * middle
        length = middle - math.sqrt(inside) if inside > 0 else -1.0
        if length > 1e-4 and (nearest is None or length < nearest[0]):
            place = along(start, way, length)
            normal = unit((place[0] - centre[0], place[1] - centre[1], place[2] - centre[2]))
            nearest = (length, normal, colour)
    if way[1] < 0 and (nearest is None or -start[1] / way[1] < nearest[0]) and start[1] > 1e-4:
        length = -start[1] / way[1]
        place = along(start, way, length)
        shade = 0.8 if (math.floor(place[0]) + math.floor(place[2])) % 2 else 0.4
        nearest = (length, (0.0, 1.0, 0.0), (shade, shade, shade))
    return nearest


def colour_of(way: Vector, shadows: bool) -> tuple[int, int, int]:
    eye: Vector = (0.0, 0.9, 0.0)
    found = hit(eye, way)
    if found is None:
        sky = 0.5 + 0.5 * way[1]
        return (round(255 * (1 - 0.5 * sky)), round(255 * (1 - 0.3 * sky)), 255)
    length, normal, colour = found
    light = unit(LIGHT)
    bright = 0.2 + 0.8 * max(0.0, dot(normal, light))
    if shadows and hit(along(along(eye, way, length), normal, 1e-3), light) is not None:
        bright = 0.2
    red, green, blue = (min(255, round(255 * part * bright)) for part in colour)
    return (red, green, blue)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--height", type=int, default=90)
    parser.add_argument("--first-row", type=int, default=0)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--shadows", action="store_true")
    given = parser.parse_args()
    last = min(given.height, given.first_row + (given.rows or given.height))
    pixels = bytearray()
    for row in range(given.first_row, last):
        for column in range(given.width):
            x = (2 * (column + 0.5) / given.width - 1) * given.width / given.height * 0.6
            y = (1 - 2 * (row + 0.5) / given.height) * 0.6
            pixels += bytes(colour_of(unit((x, y, 1.0)), given.shadows))
    head = f"P6 {given.width} {last - given.first_row} 255\n".encode()
    Path("image.ppm").write_bytes(head + pixels)
    print(f"rendered rows {given.first_row} to {last - 1}")


if __name__ == "__main__":
    main()
