# syntax=docker/dockerfile:1
# The driver and the programs that it starts. With the same sources, Go release,
# base and Debian packages, and --timestamp, two builds give the same image. For
# another architecture (--platform) Go cross-compiles; only what is run of the last
# stage needs that processor, or qemu-user by binfmt_misc.
ARG GO_VERSION=1.26

# The package depends on Python and ICU, for xfs_scrub: 100 MB that nothing here uses.
FROM docker.io/library/debian:bookworm-slim AS xfsprogs
RUN apt-get update \
 && cd /tmp && apt-get download xfsprogs \
 && dpkg-deb --extract xfsprogs_*.deb /xfsprogs

FROM --platform=$BUILDPLATFORM docker.io/library/golang:${GO_VERSION}-bookworm AS build
ARG TARGETOS TARGETARCH
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
ARG VERSION=dev
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=${TARGETOS} GOARCH=${TARGETARCH} \
    go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" -o /trivet ./cmd/trivet

FROM docker.io/library/debian:bookworm-slim
# libinih1 and liburcu8 are what mkfs.xfs is linked with.
RUN apt-get update \
 && apt-get install -y --no-install-recommends e2fsprogs btrfs-progs libinih1 liburcu8 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/cache/ldconfig/* \
           /var/lib/dpkg/*-old /var/log/apt /var/log/alternatives.log /var/log/dpkg.log
COPY --from=xfsprogs /xfsprogs/sbin/mkfs.xfs /xfsprogs/sbin/xfs_repair /usr/sbin/
COPY --from=xfsprogs /xfsprogs/usr/share/doc/xfsprogs/copyright /usr/share/doc/xfsprogs/
# Fails if one lacks a library.
RUN mkfs.ext4 -V && e2fsck -V && mkfs.xfs -V && xfs_repair -V && mkfs.btrfs -V
COPY --from=build /trivet /usr/local/bin/trivet
ARG VERSION=dev
LABEL org.opencontainers.image.title="trivet" \
      org.opencontainers.image.description="A CSI driver for the storage people already have" \
      org.opencontainers.image.source="https://github.com/trivet-csi/trivet" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# Loop devices and mounts want root, in the node's pod and, since pools lie on the
# node's disk, in the controller's.
USER 0:0
ENTRYPOINT ["/usr/local/bin/trivet"]
CMD ["driver"]
