//go:build vm

package main_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/volume"
)

// test/vm builds the program, because the virtual machine is too slow.
func init() { program = os.Getenv("TRIVET_TEST_DRIVER") }

// TestTracesOfEncrypted: the programs of lvm(8) and cryptsetup(8) are steps of the calls that run them, in the driver and in the worker
// of an export. The passphrase is in no span.
func TestTracesOfEncrypted(t *testing.T) {
	const passphrase = "correct horse battery staple"
	group := backendtest.OnGroup(t, backendtest.Room{}).Config.Section.(*lvm.Group).VolumeGroup
	t.Setenv("TRIVET_TEST_DISK", "") // the group has the disk
	server := nfsd.Start(t, nfsd.Options{})
	config := filepath.Join(t.TempDir(), "config.yaml")
	must(t, os.WriteFile(config, []byte("pools:\n- {name: group, lvm: {volumeGroup: "+group+"}}\n"+
		"- {name: nas, size: 1Gi, nfs: {server: "+server.Address()+", export: "+server.Export(t, "nas")+", init: true}}\n"), 0o600))
	collected, endpoint := startCollector(t)
	p := startProcess(t, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + endpoint, "OTEL_BSP_SCHEDULE_DELAY=100"}, config, t.TempDir(), "--node-id", "n", "-v", "10")
	ofGroup := p.useEncrypted(t, map[string]string{"backend": "lvm", "pool": "group"}, passphrase)
	ofExport := p.useEncrypted(t, map[string]string{"backend": "loop", "pool": "nas"}, passphrase)
	log, _ := p.stop(t)

	collected.wantSteps(t, collected.call(t, "CreateVolume", "group"), "lvm lvcreate")
	stage := collected.call(t, "NodeStageVolume", ofGroup)
	collected.wantSteps(t, stage, "attach", "lvm lvchange", "cryptsetup luksFormat", "cryptsetup open", "mount")
	collected.wantSteps(t, collected.call(t, "ControllerExpandVolume", ofGroup), "lvm lvextend")
	collected.wantSteps(t, collected.call(t, "NodeExpandVolume", ofGroup), "cryptsetup resize")
	collected.wantSteps(t, collected.call(t, "NodeUnstageVolume", ofGroup), "unmount", "detach", "lvm lvchange")
	collected.wantSteps(t, collected.inWorker(t, "NodeStageVolume", ofExport), "attach", "cryptsetup luksFormat", "cryptsetup open", "mount")
	collected.wantSteps(t, collected.inWorker(t, "NodeExpandVolume", ofExport), "cryptsetup resize")
	collected.wantSteps(t, collected.inWorker(t, "NodeUnstageVolume", ofExport), "unmount", "detach")
	collected.inWorker(t, "CreateVolume", "nas")
	if bytes.Contains(collected.raw, []byte(passphrase)) || strings.Contains(log, passphrase) {
		t.Errorf("the exported spans or the log contain %q", passphrase)
	}
}

// useEncrypted creates an encrypted volume, stages, expands and unstages it, and deletes it. It returns the ID. The name of the volume is that of
// its pool.
func (p *process) useEncrypted(t *testing.T, class map[string]string, passphrase string) (id string) {
	t.Helper()
	c, staging, secrets := mountCapability("ext4"), t.TempDir(), map[string]string{volume.SecretPassphrase: passphrase}
	class[volume.ParamEncryption] = volume.EncryptionLUKS2
	must(t, retry.For(t.Context(), time.Minute, func() (bool, error) { // until the pool is open
		v, err := p.ctrl.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: class["pool"], CapacityRange: &csi.CapacityRange{RequiredBytes: 64 << 20}, VolumeCapabilities: []*csi.VolumeCapability{c},
			Parameters: class, Secrets: secrets,
		})
		id = v.GetVolume().GetVolumeId()
		return status.Code(err) == codes.Unavailable, err
	}))
	_, err := p.ctrl.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "n", VolumeCapability: c})
	must(t, err)
	_, err = p.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: c, Secrets: secrets})
	must(t, err)
	larger := &csi.CapacityRange{RequiredBytes: 128 << 20}
	_, err = p.ctrl.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: larger, VolumeCapability: c})
	must(t, err)
	_, err = p.node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: staging, StagingTargetPath: staging, CapacityRange: larger, VolumeCapability: c, Secrets: secrets})
	must(t, err)
	_, err = p.node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	must(t, err)
	_, err = p.ctrl.ControllerUnpublishVolume(t.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "n"})
	must(t, err)
	_, err = p.ctrl.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	must(t, err)
	return id
}

// call returns the root span of the successful call of a method for a volume.
func (c *collected) call(t *testing.T, method, volume string) span {
	t.Helper()
	for _, s := range c.below(nil, method) {
		if attributes(s.GetAttributes())["trivet.volume"] == volume && s.GetStatus().GetCode() != trace.Status_STATUS_CODE_ERROR {
			return s
		}
	}
	t.Fatalf("got no span of %s for %s; all spans:\n%s", method, volume, c)
	return span{}
}

// inWorker returns the span of a call in the worker of the pool nas, to which the driver has passed the call.
func (c *collected) inWorker(t *testing.T, method, volume string) span {
	t.Helper()
	client := c.below(c.call(t, method, volume).GetSpanId(), method)
	if len(client) != 1 || client[0].GetKind() != trace.Span_SPAN_KIND_CLIENT || attributes(client[0].GetAttributes())["trivet.pool"] != "nas" {
		t.Fatalf("got %v below %s for %s, want the call to the worker of nas; all spans:\n%s", client, method, volume, c)
	}
	worker := c.below(client[0].GetSpanId(), method)
	if len(worker) != 1 || worker[0].GetKind() != trace.Span_SPAN_KIND_SERVER {
		t.Fatalf("got %v below the call to the worker, want the call in the worker; all spans:\n%s", worker, c)
	}
	return worker[0]
}

// wantSteps fails the test unless a call has steps with the names, directly below it or below other steps.
func (c *collected) wantSteps(t *testing.T, call span, names ...string) {
	t.Helper()
	found, parents := map[string]bool{}, [][]byte{call.GetSpanId()}
	for len(parents) > 0 {
		parent := parents[0]
		parents = parents[1:]
		for _, s := range c.spans {
			if bytes.Equal(s.GetParentSpanId(), parent) {
				found[s.GetName()] = true
				parents = append(parents, s.GetSpanId())
			}
		}
	}
	for _, name := range names {
		if !found[name] {
			t.Errorf("got no step %q of %s, want one; all spans:\n%s", name, call.GetName(), c)
		}
	}
}
