//go:build vm

package nfs

import (
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/pki"
	report "github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

const (
	// wholeDisk and poolDisk are the SCSI disks of the machine. The first one is blank. The second one has the filesystem of a pool.
	wholeDisk, poolDisk = "sda", "sdb"
	poolLabel           = "pool" // of the filesystem on poolDisk, whose device can get another name

	// The ports of the drivers. A node's driver listens at forwardingPort for the controller's driver.
	nodePort, controllerPort, forwardingPort = 9810, 9811, 9812

	// namespace contains the claims and their pods, and driversNamespace the pods of the drivers.
	namespace, driversNamespace = "default", "trivet-system"
)

// healthTest is a cluster of one node, with an API server and with the drivers of the node and of the controller. The machine is the
// node. Its calls of the Controller service go to the controller's driver.
type healthTest struct {
	*machine
	controller *machine
	server     *nfsd.Server
	api        *apiServer
	mounted    string // where poolDisk is mounted
	plugin     string // the program kubectl-trivet
}

// TestHealth lets the NFS server of a volume become silent, lets the node lose the lock of an image, fills a pool, and pulls the disk of a
// volume and the disk of a pool. Each condition is seen in events on the claim and its pod, in `kubectl trivet volumes` and in the metrics of the
// node, and after the repair it is gone. The test needs an NFS server and SCSI disks, so it runs only in the virtual machine.
func TestHealth(t *testing.T) {
	h := startHealth(t)
	t.Run("silent server", h.testSilentServer)
	t.Run("lost lock", h.testLostLock)
	t.Run("full pool", h.testFullPool)
	t.Run("pulled disk", h.testPulledDisk)
	t.Run("pulled disk of a pool", h.testPulledPool)
}

// startHealth starts the cluster.
func startHealth(t *testing.T) *healthTest {
	t.Helper()
	h := &healthTest{server: nfsd.Start(t, nfsd.Options{}), api: startAPIServer(t), mounted: t.TempDir(), plugin: filepath.Join(t.TempDir(), "kubectl-trivet")}
	testenv.Run(t, "mkfs.ext4", "-q", "-F", "-L", poolLabel, "/dev/"+poolDisk)
	testenv.Run(t, "mount", "/dev/"+poolDisk, h.mounted)
	t.Cleanup(func() { testenv.Run(t, "umount", h.mounted) })
	must(t, os.Symlink(os.Getenv(driverVariable), h.plugin))
	const podUID = "driver"
	t.Setenv("POD_UID", podUID)
	t.Setenv("KUBECONFIG", h.api.kubeconfig)

	// Both drivers run in the network namespace of the test, as the API server does.
	here := &nfsd.Node{Link: h.server.Link()}
	h.machine = member(t, here, "node-1", "--services", "node", "--node-id", "node-1", "--http-address", fmt.Sprintf("127.0.0.1:%d", nodePort))
	h.controller = member(t, here, "controller", "--services", "controller", "--http-address", fmt.Sprintf("127.0.0.1:%d", controllerPort))
	authority := backendtest.NewCluster(t)
	authority.Certify(t, h.path("certificates"), pki.NodeURI(backendtest.DriverName, h.name), x509.ExtKeyUsageServerAuth)
	authority.Certify(t, h.controller.path("certificates"), pki.ControllerURI(backendtest.DriverName), x509.ExtKeyUsageClientAuth)
	h.kubelet.Dir = h.path("kubelet")
	must(t, os.MkdirAll(filepath.Join(h.kubelet.Dir, "pods", podUID), 0o755))
	nas := "pools:\n" + nfsPool("nas", h.server, h.server.Export(t, "nas"))
	address := fmt.Sprintf("127.0.0.1:%d", forwardingPort)
	h.serve(t, nas+"- {name: disks, disks: {match: [/dev/sd*]}}\n"+fmt.Sprintf("- {name: local, directory: {path: %s}, requireMount: true}\n", h.mounted)+
		fmt.Sprintf("forwarding: {listen: %q}\nkubernetes: {kubeletDir: %s}\n", address, h.kubelet.Dir))
	h.controller.serve(t, nas+fmt.Sprintf("forwarding: {nodes: [{name: %s, address: %q}]}\nkubernetes: {events: true}\n", h.name, address))
	h.control = h.controller.control

	h.api.addNode(t, h.name, h.server.Link().Address())
	_, err := h.api.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: driversNamespace}}, metav1.CreateOptions{})
	must(t, err)
	h.api.addDriver(t, "node", h.name, nodePort)
	h.api.addDriver(t, "controller", h.name, controllerPort)
	return h
}

// member returns a machine whose driver has the flags.
func member(t *testing.T, n *nfsd.Node, name string, flags ...string) *machine {
	t.Helper()
	return &machine{Node: n, name: name, dir: t.TempDir(), flags: flags}
}

// use creates a volume with a bound claim and a pod, stages it as the kubelet does, and publishes it. All have the name of the volume.
func (h *healthTest) use(t *testing.T, name string, size int64, c *csi.VolumeCapability, parameters map[string]string) *vol {
	t.Helper()
	v := h.create(t, name, size, c, parameters)
	meta, ctx := metav1.ObjectMeta{Name: v.name}, t.Context()
	quantity := corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(size, resource.BinarySI)}
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: meta, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeName: v.name, Resources: corev1.VolumeResourceRequirements{Requests: quantity},
	}}
	claim, err := h.api.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, claim, metav1.CreateOptions{})
	must(t, err)
	pv := &corev1.PersistentVolume{ObjectMeta: meta, Spec: corev1.PersistentVolumeSpec{
		AccessModes: claim.Spec.AccessModes, Capacity: quantity, ClaimRef: &corev1.ObjectReference{Namespace: namespace, Name: v.name, UID: claim.UID},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: backendtest.DriverName, VolumeHandle: v.id}},
	}}
	pv, err = h.api.CoreV1().PersistentVolumes().Create(ctx, pv, metav1.CreateOptions{})
	must(t, err)
	pv.Status.Phase = corev1.VolumeBound
	_, err = h.api.CoreV1().PersistentVolumes().UpdateStatus(ctx, pv, metav1.UpdateOptions{})
	must(t, err)
	pod := &corev1.Pod{ObjectMeta: meta}
	pod.Spec.NodeName = h.name
	pod.Spec.Containers = []corev1.Container{{Name: "c", Image: "c"}}
	pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: v.name}}}}
	h.api.addPod(t, namespace, pod)
	must(t, h.controllerPublish(t, v))
	h.mountRecorded(t, v)
	return v
}

// mountRecorded is mount, after it has written the kubelet's record of a staged volume.
func (h *healthTest) mountRecorded(t *testing.T, v *vol) {
	t.Helper()
	dir := filepath.Dir(h.staging(v))
	must(t, os.MkdirAll(dir, 0o750))
	must(t, os.WriteFile(filepath.Join(dir, "vol_data.json"), fmt.Appendf(nil, `{"driverName":%q,"volumeHandle":%q}`, backendtest.DriverName, v.id), 0o600))
	h.mount(t, v)
}

// unmountRecorded undoes mountRecorded.
func (h *healthTest) unmountRecorded(t *testing.T, v *vol) {
	t.Helper()
	h.unmount(t, v)
	must(t, os.Remove(filepath.Join(filepath.Dir(h.staging(v)), "vol_data.json")))
}

// discard undoes use. The claim and the pod remain.
func (h *healthTest) discard(t *testing.T, v *vol) {
	t.Helper()
	h.unmountRecorded(t, v)
	must(t, h.controllerUnpublish(t, v, h.name))
	must(t, h.delete(t, v))
}

// sight is where a condition of a volume is seen.
type sight struct {
	claim, pod      []string // the events, as "TYPE REASON: MESSAGE"
	listed, counted bool     // in the output of `kubectl trivet volumes`, and in the metrics of the node
}

// look returns where a condition is seen.
func (h *healthTest) look(t *testing.T, v *vol, reason string) (s sight) {
	t.Helper()
	events, err := h.api.CoreV1().Events(namespace).List(t.Context(), metav1.ListOptions{})
	must(t, err)
	for _, e := range events.Items {
		text := fmt.Sprintf("%s %s: %s", e.Type, e.Reason, e.Message)
		switch {
		case e.InvolvedObject.Name != v.name:
		case e.InvolvedObject.Kind == "PersistentVolumeClaim":
			s.claim = append(s.claim, text)
		case e.InvolvedObject.Kind == "Pod":
			s.pod = append(s.pod, text)
		}
	}
	var all []kubectl.Volume
	cmd := exec.Command(h.plugin, "volumes", "-o", "json")
	out, err := cmd.Output() // the exit status is 1 while a pool is not open
	if parseErr := json.Unmarshal(out, &all); parseErr != nil {
		t.Fatalf("kubectl trivet volumes: got error %v and output %s, want a list", err, out)
	}
	for _, listed := range all {
		s.listed = s.listed || listed.ID == v.id && slices.ContainsFunc(listed.Health, func(c report.Health) bool { return c.Reason == reason })
	}
	s.counted = strings.Contains(h.metrics(t), `trivet_volume_health{reason="`+reason+`"`)
	return s
}

// metrics returns the metrics of the node's driver.
func (h *healthTest) metrics(t *testing.T) string {
	t.Helper()
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", nodePort))
	must(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	must(t, err)
	return string(text)
}

// awaitSeen waits until a condition of a volume is seen everywhere.
func (h *healthTest) awaitSeen(t *testing.T, v *vol, reason string) {
	t.Helper()
	has := func(events []string) bool {
		return slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, "Warning "+reason+": ") })
	}
	h.await(t, v, reason, "is seen", func(s sight) bool { return has(s.claim) && has(s.pod) && s.listed && s.counted })
}

// awaitGone waits until a condition of a volume is seen nowhere, and an event says that it is gone.
func (h *healthTest) awaitGone(t *testing.T, v *vol, reason string) {
	t.Helper()
	has := func(events []string) bool {
		return slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, "Normal ConditionGone: "+reason+" ") })
	}
	h.await(t, v, reason, "is gone", func(s sight) bool { return has(s.claim) && has(s.pod) && !s.listed && !s.counted })
}

// await waits until a condition is seen as wanted, for at most the documented time.
func (h *healthTest) await(t *testing.T, v *vol, reason, what string, wanted func(sight) bool) {
	t.Helper()
	begin := time.Now()
	must(t, retry.For(t.Context(), healthTime, func() (bool, error) {
		s := h.look(t, v, reason)
		if wanted(s) {
			return false, nil
		}
		return true, fmt.Errorf("%s of %s: got %+v, want that it %s everywhere", reason, v.name, s, what)
	}))
	t.Logf("%s of %s %s everywhere after %s", reason, v.name, what, rounded(time.Since(begin)))
}

// testSilentServer: the server drops all packets, and later answers again.
func (h *healthTest) testSilentServer(t *testing.T) {
	volumes := []*vol{
		h.use(t, "shared", mib, filesystem("", manyNodes), directoryIn("nas")),
		h.use(t, "image", 64*mib, filesystem("ext4", oneNode), imageIn("nas")),
	}
	h.server.Link().Cut(t)
	for _, v := range volumes {
		h.awaitSeen(t, v, "ServerSilent")
	}
	h.server.Link().Restore(t)
	for _, v := range volumes {
		h.awaitGone(t, v, "ServerSilent")
		h.discard(t, v)
	}
}

// testLostLock: the server frees the lock of an image. The pod is deleted and started again.
func (h *healthTest) testLostLock(t *testing.T) {
	v := h.use(t, "locked", 64*mib, filesystem("ext4", oneNode), imageIn("nas"))
	h.server.Expire(t, h.server.Link())
	h.awaitSeen(t, v, "LockLost")
	h.unmountRecorded(t, v)
	h.mountRecorded(t, v)
	h.awaitGone(t, v, "LockLost")
	h.discard(t, v)
}

// testFullPool: the disk of a pool becomes full, and then the space is free again.
func (h *healthTest) testFullPool(t *testing.T) {
	v := h.use(t, "full", 64*mib, filesystem("ext4", oneNode), imageIn("local"))
	filler := filepath.Join(h.mounted, "filler")
	if out, err := testenv.Output("", "dd", "if=/dev/zero", "of="+filler, "bs=1M"); err == nil {
		t.Fatalf("got %s, want a full disk", out)
	}
	h.awaitSeen(t, v, "PoolAlmostFull")
	must(t, os.Remove(filler))
	h.awaitGone(t, v, "PoolAlmostFull")
	h.discard(t, v)
}

// testPulledDisk: the disk of a volume in use is pulled. After it was inserted again, the pod is deleted and started again.
func (h *healthTest) testPulledDisk(t *testing.T) {
	v := h.use(t, "disk", 64*mib, filesystem("ext4", oneNode), map[string]string{"backend": "disk", "pool": "disks"})
	write(t, h.file(v, "text"), "of the disk")
	insert := testenv.PullSCSI(t, wholeDisk)
	h.awaitSeen(t, v, "DiskMissing")
	h.unmountRecorded(t, v)
	insert()
	h.mountRecorded(t, v)
	wantText(t, h.file(v, "text"), "of the disk")
	h.awaitGone(t, v, "DiskMissing")
	h.discard(t, v)
}

// testPulledPool: the disk of a pool is pulled while no program writes to its volumes. After it was inserted again, it is mounted again,
// and the driver and the pod are started again.
func (h *healthTest) testPulledPool(t *testing.T) {
	volumes := []*vol{
		h.use(t, "local-image", 64*mib, filesystem("ext4", oneNode), imageIn("local")),
		h.use(t, "local-directory", mib, filesystem("", oneNode), map[string]string{"backend": "local", "pool": "local"}),
	}
	insert := testenv.PullSCSI(t, poolDisk)
	for _, v := range volumes {
		h.awaitSeen(t, v, "DiskUnreadable")
		h.unmountRecorded(t, v)
	}
	h.stop(t)
	testenv.Run(t, "umount", h.mounted)
	insert()
	must(t, retry.For(t.Context(), waitTimeout, func() (bool, error) {
		out, err := exec.Command("mount", "LABEL="+poolLabel, h.mounted).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err != nil, err
	}))
	h.run(t)
	h.control = h.controller.control
	for _, v := range volumes {
		h.mountRecorded(t, v)
		h.awaitGone(t, v, "DiskUnreadable")
		h.discard(t, v)
	}
}
