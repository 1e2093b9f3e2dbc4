# syntax=docker/dockerfile:1
# The driver and exactly the programs that it starts: mkfs and fsck.
ARG GO_VERSION=1.26
FROM --platform=$BUILDPLATFORM docker.io/library/golang:${GO_VERSION}-bookworm AS build
ARG TARGETOS=linux TARGETARCH=amd64 VERSION=dev
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 GOOS=${TARGETOS} GOARCH=${TARGETARCH} \
    go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /trivet ./cmd/trivet

FROM docker.io/library/debian:bookworm-slim
ARG VERSION=dev
LABEL org.opencontainers.image.title="trivet" \
      org.opencontainers.image.description="A CSI driver for the storage people already have" \
      org.opencontainers.image.source="https://github.com/trivet-csi/trivet" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
RUN apt-get update \
 && apt-get install -y --no-install-recommends e2fsprogs xfsprogs btrfs-progs \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
COPY --from=build /trivet /usr/local/bin/trivet
# Loop devices and mounts want root, in the node's pod and, since pools lie on the
# node's disk, in the controller's.
USER 0:0
ENTRYPOINT ["/usr/local/bin/trivet"]
CMD ["driver"]
