# The commands for developers. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
GOFILES := $(shell git ls-files '*.go')
TOOL := go tool -modfile=tools/go.mod
FUZZTIME ?= 30s
GUESTS ?= .
KERNEL ?=
IMAGE ?= ghcr.io/trivet-csi/trivet:$(VERSION)
ARCHS ?= $(shell go env GOARCH)
# The time of all files in images and archives: that of the commit.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)

# Pairs of a program and the Debian package that contains it.
RUN_PACKAGES := mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs losetup:mount findmnt:util-linux
TEST_PACKAGES := $(RUN_PACKAGES) gcc:build-essential qemu-system-x86_64:qemu-system-x86 modprobe:kmod cpio:cpio busybox:busybox-static xz:xz-utils zstd:zstd openssl:openssl rpc.nfsd:nfs-kernel-server mount.nfs:nfs-common rpcbind:rpcbind krb5kdc:krb5-kdc kadmin.local:krb5-admin-server kinit:krb5-user ip:iproute2 dmsetup:dmsetup lvm:lvm2 cryptsetup:cryptsetup-bin fio:fio bzip2:bzip2
IO_PACKAGES := $(RUN_PACKAGES) fio:fio setpriv:util-linux /usr/lib/postgresql/*/bin/initdb:postgresql

.PHONY: help
help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build bin/trivet, statically linked
	CGO_ENABLED=0 go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o bin/trivet ./cmd/trivet

.PHONY: demo
demo: deps-run build ## Run a driver, and create, use and delete a volume (as root)
	go run ./test/demo --binary bin/trivet

# The packages that make test tests with the race detector. make test-all does that for all packages, which takes hours: the detector makes
# large reads and writes several times slower, and all dependencies are compiled for it.
RACE := ./internal/... ./linux/background ./linux/freeze ./nodeserver ./pool/... ./volumemanager/...

.PHONY: test
test: deps-test bin/promtool ## Run the tests: unit, conformance, csi-sanity, crash points, and in a VM those that this kernel does not support (as root)
	# The virtual machines run beside the other tests, because they mostly use one core.
	$(MAKE) --no-print-directory --jobs 2 --keep-going test-guests test-host test-race

# -short leaves out combinations, for example of crash points and kinds of volume.
# -count=1: some tests build and run the binary, and the test cache does not detect its changes.
test_short = $(without) go test -short -vet=off -count=1
# Without cgo and with -trimpath, as in the static binaries that the tests build: otherwise all packages would be compiled once more.
test_static = CGO_ENABLED=0 $(test_short) -trimpath

.PHONY: test-guests
test-guests:
	$(test_static) -timeout 90m ./test/vm

.PHONY: test-host
test-host:
	$(test_static) -timeout 40m $(filter-out %/test/vm $(shell go list $(RACE)),$(shell go list ./...))

.PHONY: test-race
test-race:
	$(test_short) -race -timeout 40m $(RACE)

.PHONY: test-all
test-all: deps-test bin/promtool ## Run all tests of all packages with the race detector, except the long ones of test/vm (as root; hours)
	$(without) go test -race -vet=all -count=1 -timeout 90m ./test/vm ./...

# Without root, tests run mkfs programs on files. These programs are in sbin directories, which the PATH
# of a user may lack.
.PHONY: check
check: lint ## Run vet, lint and all tests that need no root, no mounts and no VM (as any user)
	PATH="$$PATH:/usr/sbin:/sbin" TRIVET_TEST_WITHOUT=root,other-driver,$(if $(wildcard bin/promtool),,promtool)$(browser) go test ./...

.PHONY: test-vm
test-vm: deps-test ## Run the suites that need a VM and many minutes, with the newest kernel of Debian's suite KERNEL if it is set (as root; hours)
	VM_KERNEL=$(KERNEL) CGO_ENABLED=0 go test -trimpath -vet=off -count=1 -timeout 600m -v ./test/vm -long -parallel 2 -run '^TestVM$$/$(GUESTS)'

# The tests of the status page need Debian's package chromium. It is not installed, because it has about 700 MB with its
# dependencies.
browser = $(shell command -v chromium >/dev/null || echo ,browser)

# The tests to skip. Drivers of other projects are built and tested by hand (TestOtherDriver).
# A source archive and a shallow clone lack the commit from which test/frozen and test/e2e build the released driver.
# ext4 can grow while mounted only with CAP_SYS_RESOURCE (bit 24): without it, make test skips those
# tests. test/vm always runs them.
without = TRIVET_TEST_WITHOUT=other-driver$(browser)$(shell (( 0x$$(awk '/CapEff/ {print $$2}' /proc/self/status) >> 24 & 1 )) || echo ,ext4-growth)$(shell git cat-file -e "$$(cat test/frozen/release)^{commit}" 2>/dev/null || echo ,history)

.PHONY: docs-parameters
docs-parameters: ## Write the tables of docs/reference/parameters.md from the descriptors of the kinds
	go test ./cmd/trivet -run '^TestParametersDocumented$$' -update

HUGO := go run github.com/gohugoio/hugo@v0.164.0

.PHONY: docs
docs: ## Check the links of the documentation and build it as a site in dist/site (the first build takes minutes)
	go test ./test/docs -run '^TestLinks$$'
	CGO_ENABLED=0 $(HUGO) --source site --destination "$(CURDIR)/dist/site" --cleanDestinationDir --noBuildLock --panicOnWarning

.PHONY: docs-metrics
docs-metrics: ## Write the table of docs/reference/metrics.md from the descriptions of the metrics
	go test ./driver -run '^TestMetricsTable$$' -update

.PHONY: docs-values
docs-values: ## Write docs/reference/values.md from the values of the chart
	go test ./test/chart -run '^TestValuesDocumented$$' -update

.PHONY: docs-containers
docs-containers: ## Write the table of containers in docs/operations/security.md from the chart
	go test ./test/chart -run '^TestContainersDocumented$$' -update

.PHONY: docs-privileges
docs-privileges: ## Write the tables of docs/operations/security.md from the list of test/privileges
	go test ./test/privileges -run '^TestTable$$' -update

.PHONY: docs-cli
docs-cli: ## Write docs/reference/cli from the help texts of the commands
	go test ./cmd/trivet -run '^TestReference$$' -update

.PHONY: man
man: ## Write man pages of all commands to dist/man
	go test ./cmd/trivet -count=1 -ldflags '-X github.com/trivet-csi/trivet/cmd/trivet.version=$(VERSION)' -run '^TestManPages$$' -man $(CURDIR)/dist/man

.PHONY: e2e
e2e: ## Run all end-to-end tests and Kubernetes' storage tests in a new Kubernetes cluster (as root; an hour)
	$(without) test/e2e/run all

.PHONY: e2e-smoke
e2e-smoke: ## Install the manifests in a new Kubernetes cluster, run the examples, kill the driver (as root)
	$(without) test/e2e/run smoke

.PHONY: e2e-bench
e2e-bench: ## Measure volumes in Kubernetes, and emptyDir volumes for comparison (as root)
	test/e2e/run bench

.PHONY: bench
bench: deps-test build ## Measure each call, and its bare system calls for comparison; NFS and logical volumes in VMs (as root)
	go run ./test/bench --binary bin/trivet
	CGO_ENABLED=0 go build -o bin/bench ./test/bench
	test/vm/vm.sh --timeout 1800 --disk 8G --disk 8G -- test/bench/nfs.sh bin/bench --nfs /srv --binary bin/trivet --volumes 20 --rounds 2
	test/vm/vm.sh --timeout 5400 --disk 16G --disk 16G -- test/bench/lvm.sh bin/bench --groups /dev/vda,/dev/vdb --binary bin/trivet --volumes 10 --rounds 1

.PHONY: bench-io
bench-io: deps-io build ## Measure I/O in volumes with fio and PostgreSQL, and files and devices for comparison (as root; more than an hour)
	go run ./test/bench --binary bin/trivet --io

.PHONY: bench-scale
bench-scale: deps-run build ## Measure the controller's driver with 500 nodes and 20,000 volumes (as root)
	go run ./test/scale --binary bin/trivet

.PHONY: fuzz
fuzz: ## Fuzz IDs, parameters, records and configuration, FUZZTIME each
	@grep -rHo --include='*_test.go' 'func Fuzz[A-Za-z]*' . | sort | while IFS=: read -r file func; do \
		go test "$$(dirname "$$file")" -run '^$$' -fuzz "^$${func#func }$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x; \
	done

.PHONY: lint
lint: ## Check style, imports between packages and formatting
	$(TOOL) golangci-lint run --build-tags e2e,vm ./...
	cd release && go tool -modfile=../tools/go.mod golangci-lint run ./...
	go tool -modfile=release/tools/go.mod actionlint
	@unformatted=$$($(TOOL) gofumpt -l $(GOFILES)); [ -z "$$unformatted" ] || { echo "gofumpt would change: $$unformatted"; exit 1; }

.PHONY: fmt
fmt: ## Format all Go files
	$(TOOL) gofumpt -w $(GOFILES)

.PHONY: manifests
manifests: ## Render deploy/trivet.yaml from the chart, and copy the schema to the chart's files
	cp deploy/chart/values.schema.json deploy/chart/files/schema.json
	{ printf '%s\n' '# Trivet without Helm, with the default values of chart/. Generated by `make manifests`: edit the' '# chart instead. To install: kubectl apply --server-side -f trivet.yaml'; \
	  $(TOOL) helm template trivet deploy/chart --namespace trivet-system --set plainManifests=true; } > deploy/trivet.yaml

# Static binaries for linux/amd64 and linux/arm64, and the program that assembles images.
# FORCE, because go detects what has changed.
.PHONY: FORCE bin/release
bin/trivet-linux-%: FORCE
	CGO_ENABLED=0 GOOS=linux GOARCH=$* go build -trimpath -buildvcs=auto -ldflags '-s -w -X main.version=$(VERSION)' -o $@ ./cmd/trivet

bin/release:
	CGO_ENABLED=0 go build -C release -trimpath -buildvcs=false -o ../$@ .

# Load the archive with podman, skopeo, `kind load image-archive` or `ctr -n k8s.io images import`.
.PHONY: image
image: $(ARCHS:%=bin/trivet-linux-%) bin/release ## Assemble the container image of ARCHS (amd64 arm64) as an OCI archive, bin/image.tar
	bin/release image -out bin/image.tar -name $(IMAGE) -version $(VERSION) -revision $(shell git rev-parse HEAD) -epoch $(SOURCE_DATE_EPOCH) $(ARCHS:%=bin/trivet-linux-%)

.PHONY: test-release
test-release: ## Check the images of both architectures, make a release of the worktree, publish it in a registry on this machine, and verify it
	go test -count=1 -timeout 40m -v ./test/release -run '^Test(Image|Release)$$' -publish

.PHONY: release
release: ## Write the files of the release VERSION=v1.2.3 to dist/, signed with COSIGN_KEY
	release/release.sh $(VERSION)

.PHONY: publish
publish: ## Push the image and the chart of the release VERSION in dist/ to REGISTRY, and sign them there with COSIGN_KEY
	release/publish.sh $(VERSION)

.PHONY: github-release
github-release: ## Create the release VERSION on GitHub with the files of dist/
	gh release create $(VERSION) --verify-tag --title $(VERSION) --notes-file dist/notes.md dist/*

.PHONY: image-lock
image-lock: ## Update the Debian packages of the image, release/image/packages.lock
	release/image/lock.sh

# Installs the packages whose programs are missing, and prints their names. The second argument contains commands that run before.
define install
@export PATH=$$PATH:/usr/sbin:/sbin; missing=; \
for p in $(1); do command -v $${p%%:*} >/dev/null || missing="$$missing $${p#*:}"; done; \
if [ -n "$$missing" ]; then \
	echo "Installing Debian packages:$$missing"; $(2) \
	apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $$missing >/dev/null; \
fi
endef

# Only promtool is extracted, because the package would also start a server.
bin/promtool:
	@echo "Extracting promtool from Debian's package prometheus"
	@mkdir -p bin; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; cd "$$dir"; \
	apt-get -qq update; apt-get -qq -o APT::Sandbox::User=root download prometheus; \
	dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool >promtool; \
	chmod +x promtool; mv promtool "$(CURDIR)/bin/promtool"

.PHONY: deps-lock
deps-lock:
	apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends debian-archive-keyring >/dev/null

.PHONY: deps-run
deps-run:
	$(call install,$(RUN_PACKAGES))

# Without the file (pg_createcluster(1)), the package postgresql would also create a database and start a server.
NO_DATABASE := /etc/postgresql-common/createcluster.d/trivet.conf
.PHONY: deps-io
deps-io:
	$(call install,$(IO_PACKAGES),trap 'rm -f $(NO_DATABASE)' EXIT; echo create_main_cluster = false | install -D -m 0644 /dev/stdin $(NO_DATABASE);)

.PHONY: deps-test
deps-test:
	$(call install,$(TEST_PACKAGES))
