package csi_test

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// TestFalseReports: SetUp and TearDown fail if the driver returns success without an effect on the mount
// table.
func TestFalseReports(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	spec, p := persistent(driverName, "pv", "handle"), pod("one")
	f.failWith("NodePublishVolume", errFalseSuccess)
	path, err := h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{})
	wantUncertain(t, err, "nothing is mounted", path)
	f.replace("NodePublishVolume", nil)
	plugintest.Value(h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{}))(t)

	f.failWith("NodeUnpublishVolume", errFalseSuccess)
	wantError(t, h.tearDown(t, "pv", p), "still mounted", path)
	f.replace("NodeUnpublishVolume", nil)
	must(t, h.tearDown(t, "pv", p))
	must(t, h.tearDown(t, "pv", p))
	wantNothingLeft(t, h.Root)
	wantMissing(t, filepath.Dir(path))
}

// TestBlockFalseReports is TestFalseReports for raw devices.
func TestBlockFalseReports(t *testing.T) {
	h, f := registeredFake(t)
	spec, p := device(persistent(driverName, "pv", "handle")), pod("one")
	m := plugintest.Value(h.NewBlockVolumeMapper(spec, p))(t)
	must(t, m.SetUpDevice(t.Context(), nil))
	f.failWith("NodePublishVolume", errFalseSuccess)
	wantUncertain(t, m.MapPodDevice(t.Context()), "no block device")
	f.replace("NodePublishVolume", func(_ context.Context, r any) error {
		return os.WriteFile(r.(*csi.NodePublishVolumeRequest).GetTargetPath(), []byte("not a device"), 0o600)
	})
	wantUncertain(t, m.MapPodDevice(t.Context()), "no block device")
	u := plugintest.Value(h.NewBlockVolumeUnmapper("pv", p.UID))(t)
	f.failWith("NodeUnpublishVolume", errFalseSuccess)
	wantError(t, u.UnmapPodDevice(t.Context()), "12 bytes")
	f.replace("NodeUnpublishVolume", nil)
	must(t, u.UnmapPodDevice(t.Context()))
	must(t, h.UnmountDevice(t.Context(), spec))
	wantNothingLeft(t, h.Root)
}

// TestBlockNotLinked: MapPodDevice makes the link before the directory of the target path, because a
// restarted manager finds the directory by the link.
func TestBlockNotLinked(t *testing.T) {
	h, _ := registeredFake(t)
	spec, p := device(persistent(driverName, "pv", "handle")), pod("one")
	m := plugintest.Value(h.NewBlockVolumeMapper(spec, p))(t)
	must(t, m.SetUpDevice(t.Context(), nil))
	links := filepath.Dir(filepath.Dir(m.Path()))
	must(t, os.MkdirAll(filepath.Dir(links), 0o750))
	must(t, os.WriteFile(links, nil, 0o600))
	wantError(t, m.MapPodDevice(t.Context()), links)
	wantMissing(t, h.Root+"/plugins/kubernetes.io/csi/volumeDevices/publish/pv")
	must(t, os.Remove(links))
	must(t, h.UnmountDevice(t.Context(), spec))
	wantNothingLeft(t, h.Root)
}

// TestErrors: after a final error no record is left. After another error, the record remains, so that the
// call can be undone.
func TestErrors(t *testing.T) {
	for _, tc := range []struct {
		code  codes.Code
		final bool
	}{
		{codes.InvalidArgument, true},
		{codes.Internal, true},
		{codes.Unknown, true},
		{codes.NotFound, true},
		{codes.FailedPrecondition, true},
		{codes.Aborted, false},
		{codes.Unavailable, false},
		{codes.DeadlineExceeded, false},
		{codes.ResourceExhausted, false},
		{codes.Canceled, false},
	} {
		t.Run(tc.code.String(), func(t *testing.T) {
			h, f := registeredFake(t)
			spec, p := persistent(driverName, "pv", "handle"), pod("one")
			want := wantUncertain
			if tc.final {
				want = wantCertain
			}
			for _, call := range []string{"NodeStageVolume", "NodePublishVolume", "ControllerPublishVolume"} {
				f.failWith(call, status.Error(tc.code, "scripted"))
			}
			_, err := h.Attach(t.Context(), spec)
			want(t, err, driverName, "ControllerPublishVolume", tc.code.String(), "scripted")
			want(t, h.MountDevice(t.Context(), spec, nil, plugins.MounterArgs{}), "NodeStageVolume")
			_, err = h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{})
			want(t, err, "NodePublishVolume")
			if tc.final {
				wantNothingLeft(t, h.Root)
			}
			h.takeDown(t, p)
		})
	}
}

// takeDown removes the volumes of pods as a manager that has just started does, and requires that nothing
// remains.
func (h *host) takeDown(t *testing.T, pods ...*corev1.Pod) {
	t.Helper()
	must(t, h.undo(t, pods))
	wantNothingLeft(t, h.Root)
}

// undo unmounts and detaches the volumes that are found on disk, and returns the first error.
func (h *host) undo(t *testing.T, pods []*corev1.Pod) error {
	t.Helper()
	for _, p := range pods {
		dirs := plugintest.Value(filepath.Glob(h.Paths().PodVolumes(p.UID, h.Name()) + "/*"))(t)
		for _, dir := range dirs {
			if err := h.tearDown(t, filepath.Base(dir), p); err != nil {
				return err
			}
		}
		links := plugintest.Value(filepath.Glob(h.Paths().PodDevice(p.UID, h.Name(), "*")))(t)
		for _, link := range links {
			u := plugintest.Value(h.NewBlockVolumeUnmapper(filepath.Base(link), p.UID))(t)
			if err := u.UnmapPodDevice(t.Context()); err != nil {
				return err
			}
		}
	}
	staged := plugintest.Value(h.DeviceMounts())(t)
	for _, s := range staged {
		if err := h.UnmountDevice(t.Context(), s.Spec); err != nil {
			return err
		}
	}
	attached := plugintest.Value(h.Attachments())(t)
	for _, a := range attached {
		if err := h.Detach(t.Context(), a.Spec); err != nil {
			return err
		}
	}
	return nil
}

// TestErrorLater: a mounted volume keeps its record if a later SetUp fails with a final error.
func TestErrorLater(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	spec, p := persistent(driverName, "pv", "handle"), pod("one")
	plugintest.Value(h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{}))(t)
	f.failWith("NodePublishVolume", status.Error(codes.Internal, "later"))
	path, err := h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{})
	wantUncertain(t, err, "later")
	if at := mounts(t, path); len(at) != 1 {
		t.Errorf("got mounts %v of a pod that runs, want one", at)
	}
	h.takeDown(t, p)
	if n := f.count("NodeUnpublishVolume"); n != 1 {
		t.Errorf("got %d calls of NodeUnpublishVolume, want one", n)
	}
}

// TestHang: a call to a driver that does not answer ends with its context, and does not block other
// calls.
func TestHang(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	spec, p := persistent(driverName, "pv", "handle"), pod("one")
	released := make(chan struct{})
	t.Cleanup(func() { close(released) })
	entered := make(chan struct{})
	f.replace("NodePublishVolume", func(_ context.Context, r any) error {
		if r.(*csi.NodePublishVolumeRequest).GetVolumeId() == "handle" {
			close(entered)
			<-released
		}
		return mountTmpfs(r.(*csi.NodePublishVolumeRequest).GetTargetPath())
	})
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	result := make(chan error, 1)
	go func() {
		m, err := h.NewMounter(spec, p)
		if err == nil {
			err = m.SetUp(ctx, plugins.MounterArgs{})
		}
		result <- err
	}()
	<-entered
	plugintest.Value(h.setUp(t.Context(), t, persistent(driverName, "pv2", "other"), p, plugins.MounterArgs{}))(t)
	wantUncertain(t, <-result, "DeadlineExceeded")
	f.replace("NodePublishVolume", nil)
	h.takeDown(t, p)
}

// TestSecretsAreNotShown: errors contain no secrets, even if a driver quotes its request.
func TestSecretsAreNotShown(t *testing.T) {
	h, f := registeredFake(t)
	h.setSecret("team/login", map[string]string{"password": "hunter2"})
	h.setDriver(storagev1.CSIDriverSpec{TokenRequests: []storagev1.TokenRequest{{Audience: "vault"}}})
	spec := persistent(driverName, "pv", "handle")
	spec.PersistentVolume.Spec.CSI.NodePublishSecretRef = &corev1.SecretReference{Namespace: "team", Name: "login"}
	f.replace("NodePublishVolume", func(_ context.Context, request any) error {
		r := request.(*csi.NodePublishVolumeRequest)
		return status.Errorf(codes.Internal, "cannot log in with %v and %v%s", r.GetSecrets(), r.GetVolumeContext(), strings.Repeat("x", 9000))
	})
	_, err := h.setUp(t.Context(), t, spec, pod("one"), plugins.MounterArgs{})
	wantCertain(t, err, "cannot log in", "***")
	if text := err.Error(); strings.Contains(text, "hunter2") || strings.Contains(text, "token of") || len(text) > 2000 {
		t.Errorf("got an error of %d bytes, want at most 2000 bytes without secrets: %.300s", len(text), text)
	}
	wantNothingLeft(t, h.Root)
}

// TestPublishRequest: the requests contain what a kubelet sends.
func TestPublishRequest(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	yes, seconds := true, int64(900)
	h.setDriver(storagev1.CSIDriverSpec{
		PodInfoOnMount: &yes, RequiresRepublish: &yes,
		TokenRequests: []storagev1.TokenRequest{{Audience: "vault"}, {Audience: "short", ExpirationSeconds: &seconds}},
	})
	h.setSecret("vault/attach", map[string]string{"key": "attach"})
	h.setSecret("vault/stage", map[string]string{"key": "stage"})
	h.setSecret("vault/publish", map[string]string{"key": "publish"})
	spec := persistent(driverName, "pv", "handle")
	pv := &spec.PersistentVolume.Spec
	pv.MountOptions = []string{"noatime"}
	pv.CSI.FSType, pv.CSI.VolumeAttributes = "ext4", map[string]string{"colour": "blue"}
	pv.CSI.ControllerPublishSecretRef = &corev1.SecretReference{Namespace: "vault", Name: "attach"}
	pv.CSI.NodeStageSecretRef = &corev1.SecretReference{Namespace: "vault", Name: "stage"}
	pv.CSI.NodePublishSecretRef = &corev1.SecretReference{Namespace: "vault", Name: "publish"}
	spec.ReadOnly = true
	if !h.Remounts(spec) {
		t.Error("Remounts with requiresRepublish: got false, want true")
	}

	attachment := plugintest.Value(h.Attach(t.Context(), spec))(t)
	must(t, h.MountDevice(t.Context(), spec, attachment, plugins.MounterArgs{}))
	p := pod("one")
	plugintest.Value(h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{}))(t)
	if r := lastRequest[csi.ControllerPublishVolumeRequest](f); r.GetNodeId() != "fake-node" || r.GetReadonly() || r.GetSecrets()["key"] != "attach" {
		t.Errorf("got ControllerPublishVolume request %v, want node fake-node, not read-only, and the Secret attach", r)
	}
	stage := lastRequest[csi.NodeStageVolumeRequest](f)
	m := stage.GetVolumeCapability().GetMount()
	if m.GetFsType() != "ext4" || m.GetMountFlags()[0] != "noatime" || stage.GetPublishContext()["device"] != "sda" || stage.GetSecrets()["key"] != "stage" {
		t.Errorf("got NodeStageVolume request %v, want fsType ext4, mount flag noatime, device sda in the publish context, and the Secret stage", stage)
	}
	publish := lastRequest[csi.NodePublishVolumeRequest](f)
	want := map[string]string{
		"colour":                                   "blue",
		"csi.storage.k8s.io/pod.name":              "one",
		"csi.storage.k8s.io/pod.namespace":         "team",
		"csi.storage.k8s.io/pod.uid":               "uid-one",
		"csi.storage.k8s.io/serviceAccount.name":   "builder",
		"csi.storage.k8s.io/ephemeral":             "false",
		"csi.storage.k8s.io/serviceAccount.tokens": `{"short":{"token":"token of uid-one for short, 15m0s","expirationTimestamp":"1970-01-01T00:15:00Z"},"vault":{"token":"token of uid-one for vault, 1h0m0s","expirationTimestamp":"1970-01-01T01:00:00Z"}}`,
	}
	if !maps.Equal(publish.GetVolumeContext(), want) {
		t.Errorf("got volume context %v, want %v", publish.GetVolumeContext(), want)
	}
	if !publish.GetReadonly() || publish.GetPublishContext()["device"] != "sda" || publish.GetSecrets()["key"] != "publish" ||
		publish.GetStagingTargetPath() != stage.GetStagingTargetPath() ||
		publish.GetVolumeCapability().GetAccessMode().GetMode() != csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER {
		t.Errorf("got NodePublishVolume request %v, want read-only, device sda in the publish context, the Secret publish, the staging path %s, and one node with several writers", publish, stage.GetStagingTargetPath())
	}

	h.CSIDrivers[driverName].Spec.ServiceAccountTokenInSecrets = &yes
	plugintest.Value(h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{}))(t)
	publish = lastRequest[csi.NodePublishVolumeRequest](f)
	if _, ok := publish.GetVolumeContext()["csi.storage.k8s.io/serviceAccount.tokens"]; ok || len(publish.GetSecrets()) != 2 {
		t.Errorf("got NodePublishVolume request %v, want the tokens among the secrets", publish)
	}
	h.takeDown(t, p)
	if r := lastRequest[csi.ControllerUnpublishVolumeRequest](f); r.GetNodeId() != "fake-node" || r.GetVolumeId() != "handle" || r.GetSecrets()["key"] != "attach" {
		t.Errorf("got ControllerUnpublishVolume request %v, want node fake-node, volume handle, and the Secret attach", r)
	}
}

// TestSecretMissing: without the Secret, SetUp makes no call, but Delete does.
func TestSecretMissing(t *testing.T) {
	h, f := registeredFake(t)
	ref := &corev1.SecretReference{Namespace: "vault", Name: "missing"}
	spec := persistent(driverName, "pv", "handle")
	spec.PersistentVolume.Spec.CSI.NodePublishSecretRef = ref
	_, err := h.setUp(t.Context(), t, spec, pod("one"), plugins.MounterArgs{})
	wantCertain(t, err, "vault/missing")
	if !errors.Is(err, plugins.ErrNotFound) || f.count("NodePublishVolume") != 0 {
		t.Errorf("got error %v and %d calls of NodePublishVolume, want ErrNotFound and no call", err, f.count("NodePublishVolume"))
	}
	wantNothingLeft(t, h.Root)

	spec.PersistentVolume.Annotations = map[string]string{
		"volume.kubernetes.io/provisioner-deletion-secret-name": "missing", "volume.kubernetes.io/provisioner-deletion-secret-namespace": "vault",
	}
	must(t, h.Delete(t.Context(), spec.PersistentVolume))
}

// TestGroup: the manager applies the fsGroup as the fsGroupPolicy requires, unless the driver does.
func TestGroup(t *testing.T) {
	testenv.RequireRoot(t)
	group, none, file := int64(4711), storagev1.NoneFSGroupPolicy, storagev1.FileFSGroupPolicy
	for name, tc := range map[string]struct {
		fsType   string
		policy   *storagev1.FSGroupPolicy
		readOnly bool
		delegate bool // the driver has VOLUME_MOUNT_GROUP
		mode     corev1.PersistentVolumeAccessMode
		want     bool // the manager applies the group
	}{
		"default policy":           {fsType: "ext4", mode: corev1.ReadWriteOnce, want: true},
		"ReadWriteOncePod":         {fsType: "ext4", mode: corev1.ReadWriteOncePod, want: true},
		"no fsType":                {mode: corev1.ReadWriteOnce},
		"ReadWriteMany":            {fsType: "ext4", mode: corev1.ReadWriteMany},
		"policy None":              {fsType: "ext4", policy: &none, mode: corev1.ReadWriteOnce},
		"policy File":              {policy: &file, mode: corev1.ReadWriteMany, want: true},
		"read-only":                {policy: &file, readOnly: true, mode: corev1.ReadWriteOnce},
		"driver applies the group": {fsType: "ext4", policy: &file, delegate: true, mode: corev1.ReadWriteOnce},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			f := newFake(t, h)
			if tc.delegate {
				f.nodeCan = append(f.nodeCan, csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP)
			}
			h.startRegistrar(t, "fake-reg.sock", info(driverName, f.path, "1.0.0"))
			h.waitForStatus(t, "fake-reg.sock", registered)
			h.setDriver(storagev1.CSIDriverSpec{FSGroupPolicy: tc.policy})
			spec, p := persistent(driverName, "pv", "handle"), pod("one")
			spec.ReadOnly = tc.readOnly
			spec.PersistentVolume.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{tc.mode}
			spec.PersistentVolume.Spec.CSI.FSType = tc.fsType
			path := plugintest.Value(h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{FSGroup: &group}))(t)
			var st syscall.Stat_t
			must(t, syscall.Stat(path, &st))
			if applied := int64(st.Gid) == group; applied != tc.want {
				t.Errorf("got applied %v (group %d), want applied %v (group %d)", applied, st.Gid, tc.want, group)
			}
			requested := lastRequest[csi.NodePublishVolumeRequest](f).GetVolumeCapability().GetMount().GetVolumeMountGroup()
			if delegated := requested == "4711"; delegated != tc.delegate {
				t.Errorf("got group %q in the request, want delegated %v", requested, tc.delegate)
			}
			h.takeDown(t, p)
		})
	}
}

// TestInline: an inline volume has the kubelet's handle and path, and is neither attached nor staged. The
// CSIDriver object determines which lifecycle modes are allowed.
func TestInline(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	spec, p := inline(driverName, "scratch", map[string]string{"size": "1Gi"}), pod("one")
	_, err := h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{})
	wantCertain(t, err, "volumeLifecycleModes")
	yes := true
	h.setDriver(storagev1.CSIDriverSpec{
		PodInfoOnMount: &yes, VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral},
	})
	_, err = h.setUp(t.Context(), t, persistent(driverName, "pv", "handle"), p, plugins.MounterArgs{})
	wantCertain(t, err, "Persistent")
	path := plugintest.Value(h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{}))(t)
	r := lastRequest[csi.NodePublishVolumeRequest](f)
	// The SHA-256 hash of the pod's UID and the volume's name, as in a kubelet.
	const handle = "csi-093048c50afd7d39b40b0903de5456069ad41a610a4d887add0a73863ad5d8fc"
	if r.GetVolumeId() != handle || r.GetVolumeContext()["csi.storage.k8s.io/ephemeral"] != "true" || r.GetStagingTargetPath() != "" {
		t.Errorf("got NodePublishVolume request %v, want volume %s, ephemeral true in the volume context, and no staging path", r, handle)
	}
	if want := h.Root + "/pods/uid-one/volumes/kubernetes.io~csi/scratch/mount"; path != want {
		t.Errorf("got path %s, want %s", path, want)
	}
	if attach, err := h.NeedsAttach(spec); attach || err != nil {
		t.Errorf("NeedsAttach: got %v, %v; want false", attach, err)
	}
	if stage, err := h.NeedsDeviceMount(spec); stage || err != nil {
		t.Errorf("NeedsDeviceMount: got %v, %v; want false", stage, err)
	}
	h.takeDown(t, p)
}

// TestInvalid: values that become parts of paths are validated.
func TestInvalid(t *testing.T) {
	h := newHost(t)
	invalidUID := pod("one")
	invalidUID.UID = "../../etc"
	for name, tc := range map[string]struct {
		spec *plugins.Spec
		pod  *corev1.Pod
	}{
		"pod UID with a slash":        {persistent(driverName, "pv", "handle"), invalidUID},
		"name with a slash":           {persistent(driverName, "../pv", "handle"), pod("one")},
		"name ..":                     {persistent(driverName, "..", "handle"), pod("one")},
		"driver with a slash":         {persistent("../driver", "pv", "handle"), pod("one")},
		"reserved driver":             {persistent("volumeDevices", "pv", "handle"), pod("one")},
		"no handle":                   {persistent(driverName, "pv", ""), pod("one")},
		"inline, driver with a slash": {inline("a/b", "scratch", nil), pod("one")},
		"inline, name with a slash":   {inline(driverName, "a/b", nil), pod("one")},
		"raw device":                  {device(persistent(driverName, "pv", "handle")), pod("one")},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.NewMounter(tc.spec, tc.pod)
			plugintest.WantInvalid(t, err)
		})
	}
	if _, err := h.NewUnmounter("../x", "uid"); err == nil {
		t.Error("NewUnmounter of a name with a slash: got no error")
	}
	if _, err := h.NewBlockVolumeMapper(device(persistent(driverName, "staging", "handle")), pod("one")); err == nil {
		t.Error("NewBlockVolumeMapper of a reserved name: got no error")
	}
	wantNothingLeft(t, h.Root)
}
