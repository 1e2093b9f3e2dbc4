package docs

import (
	"fmt"
	"strings"
)

// Session is a sequence of blocks of commands that a test runs as one script.
type Session struct {
	Name  string
	Steps []Step
	// Filesystems are the kinds of filesystem for /var/lib. A session of Machine runs once on each.
	Filesystems []string
}

// Step is a block, or commands of the test that prepare a block or check its result.
type Step struct {
	// Block is the name of the block; empty for commands of the test.
	Block string
	// Values are replacements in the text of the block: old, new, old, new.
	Values []string
	// Shell contains the commands of the test.
	Shell string
}

// block returns a step that runs a block after replacements in its text.
func block(name string, values ...string) Step { return Step{Block: name, Values: values} }

// shell returns a step with commands of the test.
func shell(commands string) Step { return Step{Shell: commands} }

// Script returns the session as a bash script that ends at the first command that fails.
func (s Session) Script(commands map[string]Block) (string, error) {
	script := "set -euo pipefail\n"
	for _, step := range s.Steps {
		if step.Block == "" {
			script += step.Shell + "\n"
			continue
		}
		b, ok := commands[step.Block]
		if !ok {
			return "", fmt.Errorf("session %s: the documentation has no block %s: correct the plan", s.Name, step.Block)
		}
		script += fmt.Sprintf("echo '== %s' >&2\nset -x\n%s{ set +x; } 2>/dev/null\n", b.Name, strings.NewReplacer(step.Values...).Replace(b.Text))
	}
	return script, nil
}

// Machine contains the sessions that this package runs, each on a clean machine.
var Machine = []Session{
	{Name: "volume manager", Filesystems: []string{"xfs", "btrfs", "ext4"}, Steps: []Step{
		block("docs/volume-manager.md#install"),
		shell(`trivet doctor | grep 'driver  *ok .*csi.trivet.dev'
			findmnt "$(trivet volume-manager wait web | awk '$1 == "data" {print $2}')"
			TRIVET_TEST_SNAPSHOTS=1 "$TESTS"`),
		block("docs/volume-manager.md#uninstall"),
		shell(`! findmnt -R /var/lib/trivet`),
		block("docs/operations/upgrade.md#remove-the-data"),
		shell(`[ ! -e /var/lib/trivet ]
			truncate -s 1G /var/lib/disk
			disk=$(losetup --find --show /var/lib/disk)`),
		block("docs/kinds/images.md#pool-and-class", "DEVICE", `"$disk"`),
		shell(`umount /mnt/nvme
			mount /mnt/nvme
			losetup --detach "$disk" # at the unmount
			umount /mnt/nvme`),
	}},
	{Name: "examples of the volume manager", Filesystems: []string{"xfs"}, Steps: []Step{
		block("examples/volume-manager/README.md#install"),
		block("examples/volume-manager/README.md#add-volumes"),
		shell(`data=$(trivet volume-manager wait database | awk '$1 == "data" {print $2}')
			echo kept >"$data/file"`),
		block("examples/volume-manager/README.md#expand-a-volume"),
		shell(`until [ "$(df --output=size -m "$data" | tail -1)" -gt 1500 ]; do sleep 0.1; done`),
		block("examples/volume-manager/README.md#back-up-and-restore", "wait backup\n",
			`wait backup | while read -r _ copy; do grep kept "$copy/file"; done`+"\n"),
		block("examples/volume-manager/README.md#remove"),
		shell(`trivet volumes | grep pvc-database
			ls /var/lib/trivet/pools/default/default/site/html
			! findmnt -R /var/lib/trivet/volume-manager`),
	}},
	{Name: "FlexVolume", Filesystems: []string{"xfs"}, Steps: []Step{
		shell(`install -m 0755 "$TRIVET" /usr/local/bin/trivet
			mkdir -p /etc/trivet /var/lib/flex
			echo 'pools: [{name: flex, directory: {path: /var/lib/flex}}]' >/etc/trivet/flexvolume.yaml
			mkdir -p /usr/libexec/kubernetes/kubelet-plugins/volume/exec/trivet~loop
			ln -s /usr/local/bin/trivet /usr/libexec/kubernetes/kubelet-plugins/volume/exec/trivet~loop/loop`),
		block("docs/flexvolume.md#install"),
		block("docs/flexvolume.md#options"),
		block("docs/flexvolume.md#namespaces"),
		shell(`trivet volumes -o yaml --config /etc/trivet/flexvolume.yaml --state-dir /var/lib/trivet/flexvolume | grep 'namespace: team-b'`),
	}},
}

// Cluster contains the sessions that test/e2e runs one after the other in one cluster. The driver is
// not installed before the first one.
var Cluster = []Session{
	{Name: "README", Steps: []Step{
		block("README.md#install"),
		shell(rolledOut),
		shell(`kubectl delete -f examples/mount.yaml --timeout=3m`),
		block("docs/operations/upgrade.md#uninstall"),
		block("docs/operations/upgrade.md#uninstall.2"),
	}},
	{Name: "getting started", Steps: []Step{
		block("docs/getting-started.md#install"),
		block("docs/getting-started.md#install.2"),
		block("docs/getting-started.md#create-a-volume"),
		block("docs/getting-started.md#write"),
		block("docs/getting-started.md#grow"),
		shell(snapshotAPI),
		block("docs/getting-started.md#take-a-snapshot"),
		block("docs/getting-started.md#restore-it"),
		block("docs/getting-started.md#uninstall"),
		shell(`kubectl delete -f "$TRIVET_E2E_STATE/snapshots.yaml" --timeout=3m`),
	}},
	{Name: "operation", Steps: []Step{
		block("docs/operations/install.md#install"),
		shell(rolledOut),
		shell(`kubectl apply -f - <<'END'
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: old}
spec:
  storageClassName: trivet-loop
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: user}
spec:
  restartPolicy: Never
  containers:
  - name: user
    image: docker.io/library/busybox:1.37
    command: [sh, -c, "echo data >/old/file && chown 7:8 /old/file"]
    volumeMounts: [{name: old, mountPath: /old}]
  volumes: [{name: old, persistentVolumeClaim: {claimName: old}}]
END
kubectl wait pod/user --for=jsonpath='{.status.phase}'=Succeeded --timeout=3m
kubectl delete pod/user`),
		block("docs/migration.md#copy-the-data"),
		block("docs/migration.md#copy-the-data.2"),
		shell(`[ "$(kubectl get pvc old -o jsonpath='{.status.capacity.storage}')" = 1Gi ]
kubectl run reader --image=docker.io/library/busybox:1.37 --restart=Never --overrides='{"spec": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "old"}}],
	"containers": [{"name": "reader", "image": "docker.io/library/busybox:1.37", "command": ["sh", "-c", "grep data /v/file && [ $(stat -c %u:%g /v/file) = 7:8 ]"], "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]}}'
kubectl wait pod/reader --for=jsonpath='{.status.phase}'=Succeeded --timeout=3m
kubectl delete pod/reader pvc/old --timeout=3m; rm new.yaml`),
		block("docs/troubleshooting.md#troubleshooting", "NODE", "node1"),
		block("docs/reference/alerts.md#alerts"),
		block("docs/operations/nodes.md#which-node-has-a-pool", "NODE", "node1"),
		block("docs/operations/upgrade.md#upgrade"),
		shell(`helm upgrade trivet deploy/chart --namespace trivet-system --reset-then-reuse-values --wait --timeout=3m \
			--set shape=oneNode --set 'node.nodeSelector.kubernetes\.io/hostname=node1'`),
		block("docs/operations/install.md#one-node"),
		shell(rolledOut),
		block("docs/operations/certificates.md#certificates"),
		shell(rolledOut),
		shell(snapshotAPI),
		block("docs/snapshots.md#enable-snapshots.2"),
		shell(rolledOut),
		block("docs/snapshots.md#groups.2"),
		shell(`kubectl create namespace team-a`),
		block("docs/flexvolume.md#admission"),
		shell(`kubectl delete namespace team-a --timeout=3m
			helm uninstall trivet --namespace trivet-system --wait --timeout=3m
			kubectl delete -f "$TRIVET_E2E_STATE/snapshots.yaml" --timeout=3m`),
	}},
	{Name: "plain manifests", Steps: []Step{
		block("docs/operations/install.md#install.2"),
		shell(rolledOut),
	}},
}

// Parts contains the sessions that tests of test/e2e run between their own steps, by name. The tests set the variables.
var Parts = map[string]Session{
	"volume mode": {Steps: []Step{block("docs/snapshots.md#restore-with-another-volume-mode", "CONTENT", `"$CONTENT"`)}},
	"velero install": {Steps: []Step{
		block("docs/operations/backup.md#velero"),
		shell(rolledOut),
		block("docs/operations/backup.md#velero.2", "https://s3.example.com", `"$S3_URL"`, "--secret-file credentials", `--secret-file "$CREDENTIALS"`),
	}},
	"velero backup":  {Steps: []Step{block("docs/operations/backup.md#velero.3", "monday", `"$BACKUP"`)}},
	"velero restore": {Steps: []Step{block("docs/operations/backup.md#velero.4", "monday", `"$BACKUP"`)}},
}

// rolledOut waits until the pods of the driver are ready.
const rolledOut = `for w in daemonset/trivet-node deployment/trivet-controller; do kubectl -n trivet-system rollout status $w --timeout=3m; done`

// snapshotAPI installs the snapshot API, which distributions include.
const snapshotAPI = `kubectl apply --server-side -f "$TRIVET_E2E_STATE/snapshots.yaml"
	kubectl -n kube-system rollout status deployment/snapshot-controller --timeout=3m`

const (
	needsServer  = "needs an NFS server with the name nas.lan"
	needsQuotas  = "needs a kernel with project quotas, as in test/vm"
	needsNetwork = "fetches from the Internet"
	needsDisks   = "needs whole disks that move between two machines"
	needsMapper  = "needs the device mapper; rows of the conformance tests run the same commands, in the guest encryption"
	needsLogical = "needs volumes of TopoLVM or lvm-localpv; row TakenOver of the conformance tests takes over such logical volumes"
	needsRestic  = "needs restic and the manifests of another page"
	needsRelease = "needs a published release; TestRelease of test/release runs the same commands with its own registry"
)

// Nowhere contains the blocks that no test runs, with the reason.
var Nowhere = map[string]string{
	"docs/kinds/lvm.md#logical-volumes":                   "needs the device mapper; the conformance tests of backend/lvm create volume groups",
	"docs/kinds/lvm.md#thin-pools":                        "needs the device mapper; the conformance tests of backend/lvm create thin pools",
	"docs/kinds/lvm.md#move-the-volume-group":             "needs the device mapper; row GroupMoved of the conformance tests runs these commands",
	"docs/encryption.md#class-and-secret":                 needsMapper,
	"docs/encryption.md#change-the-passphrase":            needsMapper,
	"docs/encryption.md#back-up-and-restore-the-header":   needsMapper,
	"docs/encryption.md#back-up-and-restore-the-header.2": needsMapper,
	"README.md#install.2":                                 "runs all tests, this one too",

	"examples/volume-manager/README.md#add-volumes.2": "needs podman and a registry; TestExamples of test/volumemanager checks the paths",
	"docs/operations/backup.md#without-kubernetes":    needsRestic,
	"docs/operations/backup.md#without-kubernetes.2":  needsRestic,
	"docs/releasing.md#verify-a-release":              needsRelease,
	"docs/releasing.md#verify-a-release.2":            needsRelease,
	"docs/releasing.md#verify-a-release.3":            needsRelease,
	"docs/releasing.md#make-a-release":                needsRelease,

	"docs/kinds/disks.md#move-a-disk":   needsDisks,
	"docs/kinds/disks.md#move-a-disk.2": needsDisks,
	"docs/kinds/disks.md#move-a-disk.3": needsDisks,
	"docs/kinds/disks.md#move-a-disk.4": needsDisks,

	"docs/operations/nodes.md#a-node-is-gone":             "needs a node whose disk is lost",
	"docs/operations/nodes.md#unmount-the-disk-of-a-pool": "needs a pool on a disk of its own",
	"docs/troubleshooting.md#troubleshooting.2":           "needs a driver that does not start; TestDoctor of test/e2e runs the same command with such a driver",

	"docs/kinds/directories.md#enable-quotas":           needsQuotas,
	"docs/kinds/directories.md#enable-quotas.2":         needsQuotas,
	"docs/kinds/directories.md#enable-quotas.3":         "needs btrfs-progs 6.7, which Debian 12 lacks",
	"docs/kinds/directories.md#when-quotas-are-damaged": needsQuotas,

	"docs/migration.md#from-csi-driver-nfs":                    needsServer,
	"docs/migration.md#volumes-that-exist":                     "needs volumes of csi-driver-nfs",
	"docs/migration.md#from-topolvm-and-openebs-lvm-localpv":   needsLogical,
	"docs/migration.md#from-topolvm-and-openebs-lvm-localpv.2": needsLogical,
	"docs/migration.md#from-topolvm-and-openebs-lvm-localpv.3": needsLogical,
	"docs/kinds/nfs.md#test-the-export":                        needsServer,
	"docs/operations/capacity.md#automatic-growth":             needsNetwork,
	"docs/snapshots.md#enable-snapshots":                       needsNetwork,
	"docs/snapshots.md#groups":                                 "needs a registry with the image of snapshot-controller",
}
