# Everything a developer runs. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
GOFILES := $(shell git ls-files '*.go')
TOOL := go tool -modfile=tools/go.mod
FUZZTIME ?= 30s
GUESTS ?= .
IMAGE ?= trivet:$(VERSION)
PLATFORM ?= linux/$(shell go env GOARCH)

# Debian packages that have the programs named before the colon.
RUN_PACKAGES := mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs losetup:mount findmnt:util-linux
TEST_PACKAGES := $(RUN_PACKAGES) gcc:build-essential qemu-system-x86_64:qemu-system-x86 modprobe:kmod cpio:cpio busybox:busybox-static xz:xz-utils openssl:openssl rpc.nfsd:nfs-kernel-server mount.nfs:nfs-common rpcbind:rpcbind ip:iproute2 dmsetup:dmsetup

.PHONY: help
help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build bin/trivet, static
	CGO_ENABLED=0 go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/trivet ./cmd/trivet

.PHONY: demo
demo: deps-run build ## Run a driver and take a volume through its whole life (as root)
	go run ./test/demo --binary bin/trivet

.PHONY: test
test: deps-test bin/promtool ## Run every test: unit, conformance, csi-sanity, crash points, and in a VM what this kernel lacks (as root)
	go vet ./...
	# -count=1: some tests build and run the binary, which the cache does not see.
	$(without) go test -race -count=1 -timeout 40m ./...

# What the programs of $(RUN_PACKAGES) make in files needs no root, but their directory in PATH.
.PHONY: check
check: lint ## Run vet, lint and every test that needs no root, no mounts and no VM (as any user)
	PATH="$$PATH:/usr/sbin:/sbin" TRIVET_TEST_WITHOUT=root,other-driver,$(if $(wildcard bin/promtool),,promtool) go test ./...

.PHONY: test-vm
test-vm: deps-test ## Run the suites that take a VM and minutes: NFS, project quotas, whole disks (as root; an hour)
	go test -count=1 -timeout 150m -v ./test/vm -long -parallel 2 -run '^TestVM$$/$(GUESTS)'

# Drivers of other projects are built and tested by hand (docs/volume-manager.md). ext4 grows
# online with CAP_SYS_RESOURCE (bit 24) only: where the kernel does not give it, those
# tests are left out here; test/vm runs them in any case.
without = TRIVET_TEST_WITHOUT=other-driver$(shell (( 0x$$(awk '/CapEff/ {print $$2}' /proc/self/status) >> 24 & 1 )) || echo ,ext4-growth)

.PHONY: docs-parameters
docs-parameters: ## Write the tables of docs/parameters.md from the descriptors of the kinds
	go test ./cmd/trivet -run '^TestParametersDocumented$$' -update

.PHONY: e2e
e2e: ## Run everything in a real Kubernetes of its own, with Kubernetes' storage tests (as root; an hour)
	test/e2e/run all

.PHONY: e2e-smoke
e2e-smoke: ## Install the manifests in a real Kubernetes, run the examples, kill the driver (as root)
	test/e2e/run smoke

.PHONY: e2e-bench
e2e-bench: ## Measure volumes through all of Kubernetes, beside emptyDir (as root)
	test/e2e/run bench

.PHONY: bench
bench: deps-test build ## Measure each call beside a floor of bare system calls, NFS in the VM (as root)
	go run ./test/bench --binary bin/trivet
	CGO_ENABLED=0 go build -o bin/bench ./test/bench
	test/vm/vm.sh --timeout 1800 --disk 8G --disk 8G -- test/bench/nfs.sh bin/bench --nfs /srv --binary bin/trivet --volumes 20 --rounds 2

.PHONY: bench-scale
bench-scale: deps-run build ## Measure the controller's driver before 500 nodes and 20,000 volumes (as root)
	go run ./test/scale --binary bin/trivet

.PHONY: fuzz
fuzz: ## Fuzz IDs, parameters, records and configuration, FUZZTIME each
	@grep -rHo --include='*_test.go' 'func Fuzz[A-Za-z]*' . | sort | while IFS=: read -r file func; do \
		go test "$$(dirname "$$file")" -run '^$$' -fuzz "^$${func#func }$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x; \
	done

.PHONY: lint
lint: ## Check style, imports between packages and formatting
	$(TOOL) golangci-lint run --build-tags e2e,vm ./...
	@unformatted=$$($(TOOL) gofumpt -l $(GOFILES)); [ -z "$$unformatted" ] || { echo "gofumpt would change: $$unformatted"; exit 1; }

.PHONY: fmt
fmt: ## Format all Go files
	$(TOOL) gofumpt -w $(GOFILES)

.PHONY: manifests
manifests: ## Render deploy/trivet.yaml from the chart, and copy its schema for its templates
	cp deploy/chart/values.schema.json deploy/chart/files/schema.json
	{ printf '%s\n' '# Trivet without Helm, with the default values of chart/. Made by `make manifests`:' '# change the chart. To install: kubectl apply --server-side -f trivet.yaml'; \
	  $(TOOL) helm template trivet deploy/chart --namespace trivet-system --set plainManifests=true; } > deploy/trivet.yaml

.PHONY: image
image: ## Build the container image with buildah
	buildah build --platform $(PLATFORM) --layers --timestamp $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct)) --build-arg VERSION=$(VERSION) -t $(IMAGE) .

# Install the packages whose programs are missing, and say so.
define install
@export PATH=$$PATH:/usr/sbin:/sbin; missing=; \
for p in $(1); do command -v $${p%%:*} >/dev/null || missing="$$missing $${p#*:}"; done; \
if [ -n "$$missing" ]; then \
	echo "Installing Debian packages:$$missing"; \
	apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $$missing >/dev/null; \
fi
endef

# promtool alone: the package would start a server too.
bin/promtool:
	@echo "Extracting promtool from Debian's package prometheus"
	@mkdir -p bin; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; cd "$$dir"; \
	apt-get -qq update; apt-get -qq -o APT::Sandbox::User=root download prometheus; \
	dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool >promtool; \
	chmod +x promtool; mv promtool "$(CURDIR)/bin/promtool"

.PHONY: deps-run
deps-run:
	$(call install,$(RUN_PACKAGES))

.PHONY: deps-test
deps-test:
	$(call install,$(TEST_PACKAGES))
