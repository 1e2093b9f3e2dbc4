# syntax=docker/dockerfile:1
# The image of `make image`, for those who build with Docker or buildah. Only the first stage runs programs, and
# only of the machine that builds. It assembles the content of the image for any architecture (release/image). The
# only difference: `trivet version` prints no commit, because the build has no repository.
ARG GO_VERSION=1.26

FROM --platform=$BUILDPLATFORM docker.io/library/golang:${GO_VERSION}-bookworm AS build
ARG TARGETARCH
ARG VERSION=dev
ARG SOURCE_DATE_EPOCH=0
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build --mount=type=cache,target=/root/.cache/trivet-packages \
    make bin/release bin/trivet-linux-${TARGETARCH} \
 && bin/release rootfs -out /rootfs -epoch ${SOURCE_DATE_EPOCH} bin/trivet-linux-${TARGETARCH}

FROM scratch
COPY --from=build /rootfs /
ARG VERSION=dev
LABEL org.opencontainers.image.title="trivet" \
      org.opencontainers.image.description="A CSI driver for storage that the nodes already have" \
      org.opencontainers.image.source="https://github.com/trivet-csi/trivet" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin
# Mounts and loop devices need root.
USER 0:0
ENTRYPOINT ["/usr/local/bin/trivet"]
CMD ["driver"]
