package csi_test

import (
	"errors"
	"maps"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// options returns the options to provision a volume for a claim. size is the claim's request, parameters are
// those of the class.
func options(driver, name, size string, parameters map[string]string) plugins.ProvisionOptions {
	return plugins.ProvisionOptions{
		PVName: "pvc-" + name,
		Claim: &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: "uid-of-claim", Annotations: map[string]string{"example.com/login": "mary"}},
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}},
			},
		},
		Class: &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "class"}, Provisioner: driver, Parameters: parameters},
	}
}

// TestProvision: the requests and the PersistentVolume are as with external-provisioner.
func TestProvision(t *testing.T) {
	h, f := registeredFake(t)
	h.setSecret("team/admin-claim", map[string]string{"key": "admin"})
	f.created = &csi.Volume{
		VolumeId: "made", CapacityBytes: 2 << 30, VolumeContext: map[string]string{"a": "b"},
		AccessibleTopology: []*csi.Topology{{Segments: map[string]string{"zone": "here"}}},
	}
	o := options(driverName, "claim", "1Gi", map[string]string{
		"type": "fast", "csi.storage.k8s.io/fstype": "xfs",
		"csi.storage.k8s.io/provisioner-secret-name":       "admin-${pvc.name}",
		"csi.storage.k8s.io/provisioner-secret-namespace":  "${pvc.namespace}",
		"csi.storage.k8s.io/node-publish-secret-name":      "${pvc.annotations['example.com/login']}",
		"csi.storage.k8s.io/node-publish-secret-namespace": "vault",
	})
	retain := corev1.PersistentVolumeReclaimRetain
	o.Class.ReclaimPolicy, o.Class.MountOptions = &retain, []string{"noatime"}
	if !h.Provisions(o.Class) {
		t.Error("Provisions for the driver's class: got false, want true")
	}
	pv := plugintest.Value(h.Provision(t.Context(), o))(t)
	r := lastRequest[csi.CreateVolumeRequest](f)
	parameters := map[string]string{
		"type": "fast", "csi.storage.k8s.io/pv/name": "pvc-claim", "csi.storage.k8s.io/pvc/name": "claim", "csi.storage.k8s.io/pvc/namespace": "team",
	}
	if r.GetName() != "pvc-claim" || !maps.Equal(r.GetParameters(), parameters) || r.GetCapacityRange().GetRequiredBytes() != 1<<30 || r.GetSecrets()["key"] != "admin" ||
		r.GetAccessibilityRequirements().GetRequisite()[0].GetSegments()["zone"] != "here" ||
		r.GetVolumeCapabilities()[0].GetMount().GetFsType() != "xfs" || r.GetVolumeCapabilities()[0].GetMount().GetMountFlags()[0] != "noatime" ||
		r.GetVolumeCapabilities()[0].GetAccessMode().GetMode() != csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER {
		t.Errorf("got CreateVolume request %v, want name pvc-claim, parameters %v, 1 GiB, Secret admin-claim, zone here, xfs with noatime, and one node that writes", r, parameters)
	}
	source := pv.Spec.CSI
	if source.VolumeHandle != "made" || source.FSType != "xfs" || source.VolumeAttributes["a"] != "b" || source.NodePublishSecretRef.Name != "mary" ||
		pv.Name != "pvc-claim" || pv.Spec.Capacity.Storage().Value() != 2<<30 || pv.Spec.PersistentVolumeReclaimPolicy != retain ||
		pv.Spec.ClaimRef.UID != "uid-of-claim" || pv.Spec.StorageClassName != "class" || pv.Annotations["pv.kubernetes.io/provisioned-by"] != driverName ||
		pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Key != "zone" {
		t.Errorf("got PersistentVolume %+v, want name pvc-claim, handle made, xfs, attribute a=b, Secret mary, 2 GiB, policy Retain, claim UID uid-of-claim, class class, the driver's annotation, and an affinity for the zone", pv)
	}
	must(t, h.Delete(t.Context(), pv))
	if r := lastRequest[csi.DeleteVolumeRequest](f); r.GetVolumeId() != "made" || r.GetSecrets()["key"] != "admin" {
		t.Errorf("got DeleteVolume request %v, want volume made and the Secret admin-claim", r)
	}
}

// TestProvisionMismatch: a volume that does not match the request is deleted, and Provision fails.
func TestProvisionMismatch(t *testing.T) {
	for name, tc := range map[string]struct {
		created *csi.Volume
		source  string // the handle of the snapshot to copy; "" for none
		want    string // a part of the error; "" if Provision succeeds
		deleted bool   // DeleteVolume is called
	}{
		"no volume":            {created: nil, want: "no volume ID"},
		"no ID":                {created: &csi.Volume{CapacityBytes: 1 << 30}, want: "no volume ID"},
		"too small":            {created: &csi.Volume{VolumeId: "made", CapacityBytes: 1}, want: "has 1 B, less than the requested 1 GiB", deleted: true},
		"another topology":     {created: &csi.Volume{VolumeId: "made", AccessibleTopology: []*csi.Topology{{Segments: map[string]string{"zone": "there"}}}}, want: "zone:here", deleted: true},
		"no content source":    {created: &csi.Volume{VolumeId: "made"}, source: "snapshot", want: "source's content", deleted: true},
		"valid without a size": {created: &csi.Volume{VolumeId: "made"}},
		"valid with a source":  {created: &csi.Volume{VolumeId: "made", ContentSource: &csi.VolumeContentSource{}}, source: "snapshot"},
	} {
		t.Run(name, func(t *testing.T) {
			h, f := registeredFake(t)
			f.created = tc.created
			o := options(driverName, "claim", "1Gi", nil)
			o.Source.SnapshotHandle = tc.source
			pv, err := h.Provision(t.Context(), o)
			if tc.want == "" {
				must(t, err)
				if got := pv.Spec.Capacity.Storage().Value(); got != 1<<30 {
					t.Errorf("got capacity of %d bytes, want that of the request", got)
				}
				return
			}
			wantError(t, err, tc.want)
			if plugins.Uncertain(err) == tc.deleted {
				t.Errorf("got error %v, uncertain %v; want uncertain %v", err, plugins.Uncertain(err), !tc.deleted)
			}
			if n := f.count("DeleteVolume"); (n == 1) != tc.deleted {
				t.Errorf("got %d calls of DeleteVolume, want one call: %v", n, tc.deleted)
			}
			f.failWith("DeleteVolume", status.Error(codes.Internal, "scripted"))
			if _, err := h.Provision(t.Context(), o); tc.deleted {
				wantUncertain(t, err, tc.want, "scripted")
			}
		})
	}
}

// TestProvisionRefused: Provision does not call CreateVolume for an invalid or unsupported request.
func TestProvisionRefused(t *testing.T) {
	h, f := registeredFake(t)
	for name, tc := range map[string]struct {
		change  func(*plugins.ProvisionOptions)
		invalid bool
		want    string
	}{
		"another driver": {func(o *plugins.ProvisionOptions) { o.Class.Provisioner = "other.example.com" }, false, "not registered"},
		"selector":       {func(o *plugins.ProvisionOptions) { o.Claim.Spec.Selector = &metav1.LabelSelector{} }, true, "selector"},
		"unknown reserved parameter": {func(o *plugins.ProvisionOptions) {
			o.Class.Parameters = map[string]string{"csi.storage.k8s.io/fstypo": "x"}
		}, true, "fstypo"},
		"name of a Secret without its namespace": {func(o *plugins.ProvisionOptions) {
			o.Class.Parameters = map[string]string{"csi.storage.k8s.io/node-stage-secret-name": "x"}
		}, true, "node-stage"},
		"unknown variable": {func(o *plugins.ProvisionOptions) { o.Class.Parameters = secretOf("node-stage", "${nonsense}") }, true, "nonsense"},
		"missing annotation": {func(o *plugins.ProvisionOptions) {
			o.Class.Parameters = secretOf("node-stage", "${pvc.annotations['none']}")
		}, true, "none"},
		"provisioner's Secret by annotation": {func(o *plugins.ProvisionOptions) {
			o.Class.Parameters = secretOf("provisioner", "${pvc.annotations['example.com/login']}")
		}, true, "example.com/login"},
		"missing Secret": {func(o *plugins.ProvisionOptions) { o.Class.Parameters = secretOf("provisioner", "missing") }, false, "vault/missing"},
		"other allowed topology": {func(o *plugins.ProvisionOptions) {
			o.Class.AllowedTopologies = []corev1.TopologySelectorTerm{{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{{Key: "zone", Values: []string{"there"}}}}}
		}, true, "allowedTopologies"},
		"source of another driver": {func(o *plugins.ProvisionOptions) {
			o.Source.Volume = persistent("other.example.com", "pv", "handle").PersistentVolume
		}, true, "not of driver"},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(driverName, "claim", "1Gi", nil)
			tc.change(&o)
			_, err := h.Provision(t.Context(), o)
			wantCertain(t, err, tc.want)
			if _, invalid := errors.AsType[*plugins.InvalidError](err); invalid != tc.invalid {
				t.Errorf("got error %v, invalid %v; want invalid %v", err, invalid, tc.invalid)
			}
		})
	}
	if n := f.count("CreateVolume"); n != 0 {
		t.Errorf("got %d calls of CreateVolume, want none", n)
	}
	if h.Provisions(&storagev1.StorageClass{Provisioner: "kubernetes.io/no-provisioner"}) {
		t.Error("Provisions for an in-tree provisioner: got true, want false")
	}
}

// secretOf returns the parameters with a reference to a Secret in the namespace vault.
func secretOf(kind, name string) map[string]string {
	return map[string]string{"csi.storage.k8s.io/" + kind + "-secret-name": name, "csi.storage.k8s.io/" + kind + "-secret-namespace": "vault"}
}

// TestNoController: a driver without a controller service at its endpoint creates, attaches and expands
// no volumes.
func TestNoController(t *testing.T) {
	t.Run("no controller service", func(t *testing.T) {
		h := newHost(t)
		f := newFake(t, h)
		f.plugin, f.nodeCan = nil, nil
		h.testWithoutController(t, f, f.path)
	})
	t.Run("at another endpoint", func(t *testing.T) {
		h := newHost(t)
		f := newFake(t, h)
		f.nodeCan = nil
		path := filepath.Join(filepath.Dir(f.path), "node.sock")
		serve(t, path, func(s *grpc.Server) {
			csi.RegisterIdentityServer(s, f)
			csi.RegisterNodeServer(s, f)
		})
		h.testWithoutController(t, f, path)
	})
}

// testWithoutController registers a driver, and requires that each call to its controller service fails.
func (h *host) testWithoutController(t *testing.T, f *fake, endpoint string) {
	t.Helper()
	h.startRegistrar(t, "fake-reg.sock", info(driverName, endpoint, "1.0.0"))
	h.waitForStatus(t, "fake-reg.sock", registered)
	spec := persistent(driverName, "pv", "handle")
	_, err := h.Provision(t.Context(), options(driverName, "claim", "1Gi", nil))
	wantCertain(t, err, "CREATE_DELETE_VOLUME")
	wantCertain(t, h.Delete(t.Context(), spec.PersistentVolume), "CREATE_DELETE_VOLUME")
	_, _, err = h.Expand(t.Context(), spec.PersistentVolume, resource.MustParse("2Gi"))
	wantCertain(t, err, "EXPAND_VOLUME")
	if needs, err := h.NeedsAttach(spec); needs || err != nil {
		t.Errorf("NeedsAttach: got %v, %v; want false", needs, err)
	}
	must(t, h.NodeExpand(t.Context(), spec, plugins.NodeExpandOptions{Size: resource.MustParse("2Gi")}))
	if n := f.count("NodeExpandVolume"); n != 0 {
		t.Errorf("got %d calls of NodeExpandVolume, want none", n)
	}
}

// TestExpand: the driver expands a volume with the Secrets of the PersistentVolume. A size that is less than
// requested is an error.
func TestExpand(t *testing.T) {
	h, f := registeredFake(t)
	spec := persistent(driverName, "pv", "handle")
	for _, name := range []string{"controller", "node"} {
		h.setSecret("vault/"+name, map[string]string{"key": name})
	}
	spec.PersistentVolume.Spec.CSI.ControllerExpandSecretRef = &corev1.SecretReference{Namespace: "vault", Name: "controller"}
	spec.PersistentVolume.Spec.CSI.NodeExpandSecretRef = &corev1.SecretReference{Namespace: "vault", Name: "node"}
	f.expandedSize = 3 << 30
	actual, node, err := h.Expand(t.Context(), spec.PersistentVolume, resource.MustParse("2Gi"))
	must(t, err)
	if actual.Value() != 3<<30 || !node {
		t.Errorf("got %d bytes and node expansion %v, want 3 GiB and true", actual.Value(), node)
	}
	if r := lastRequest[csi.ControllerExpandVolumeRequest](f); r.GetVolumeId() != "handle" || r.GetSecrets()["key"] != "controller" {
		t.Errorf("got ControllerExpandVolume request %v, want volume handle and the Secret controller", r)
	}
	must(t, h.NodeExpand(t.Context(), spec, plugins.NodeExpandOptions{Path: "/a", DeviceMountPath: "/b", Size: actual}))
	if r := lastRequest[csi.NodeExpandVolumeRequest](f); r.GetVolumePath() != "/a" || r.GetStagingTargetPath() != "/b" || r.GetCapacityRange().GetRequiredBytes() != 3<<30 || r.GetSecrets()["key"] != "node" {
		t.Errorf("got NodeExpandVolume request %v, want path /a, staging path /b, 3 GiB and the Secret node", r)
	}
	f.change(func() { f.expandedSize = 1 })
	_, _, err = h.Expand(t.Context(), spec.PersistentVolume, resource.MustParse("2Gi"))
	wantCertain(t, err, "has 1 B, less than the requested 2 GiB")
}

// TestNeedsAttach: attachRequired of the CSIDriver object can switch off attaching.
func TestNeedsAttach(t *testing.T) {
	h, _ := registeredFake(t)
	spec, no := persistent(driverName, "pv", "handle"), false
	if needs, err := h.NeedsAttach(spec); !needs || err != nil {
		t.Errorf("without a CSIDriver object: got %v, %v; want true", needs, err)
	}
	h.setDriver(storagev1.CSIDriverSpec{AttachRequired: &no})
	if needs, err := h.NeedsAttach(spec); needs || err != nil {
		t.Errorf("with attachRequired false: got %v, %v; want false", needs, err)
	}
}
