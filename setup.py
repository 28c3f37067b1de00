"""The part of the build that is no metadata (see setup.cfg): the copy engine, a C library.

It has no Python in it, so it is built once for all versions, under the name of the stable ABI.
`optional`: without a C compiler the installation goes on, and Tierckpt copies with torch.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tierckpt.snapshot._copy_engine",
            [
                "common/tierckpt/snapshot/copy_engine.c",
                "common/tierckpt/snapshot/tensor_memory.c",
                "common/tierckpt/coordination/ballots.c",
            ],
            extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
