package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

const gib = int64(1) << 30

// life contains the demo's volume and the clients for its calls.
type life struct {
	backend, fsType string // the kind of the volume; fsType is empty for a directory

	ctx      context.Context // ends at an interrupt; only the waits at the start obey that
	dir      string          // contains all files of the demo
	identity csi.IdentityClient
	control  csi.ControllerClient
	node     csi.NodeClient

	id string
	// undo contains a function for each step to undo. run calls the last one first.
	undo []func() error
}

func (l *life) path(name string) string { return filepath.Join(l.dir, name) }

// folder returns the path of the volume's folder in the pool.
func (l *life) folder() string { return l.path("disk/trivet/pools/default/volumes/pvc-demo") }

// ofImage returns the note if the volume is a disk image, and an empty string otherwise.
func (l *life) ofImage(note string) string {
	if l.fsType == "" {
		return ""
	}
	return note
}

func (l *life) capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: l.fsType}},
	}
}

// run takes the steps of the volume's life until one fails. Then it undoes all steps taken.
func (l *life) run() (err error) {
	defer func() {
		for len(l.undo) > 0 {
			last := l.undo[len(l.undo)-1]
			l.undo = l.undo[:len(l.undo)-1]
			err = errors.Join(err, last())
		}
	}()
	steps := []func() error{
		l.ready, l.create, l.publishToNode, l.stage, l.publishFirst, l.write, l.publishSecond, l.readBack,
		l.grow, l.growOnNode, l.stats, l.list,
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// call makes one call and prints its name, its duration and the note.
func call[Req, Resp any](l *life, name string, f func(context.Context, Req, ...grpc.CallOption) (Resp, error), req Req, note string) (Resp, error) {
	// An interrupt cancels no call, so that a step is either complete or not begun when the steps are undone.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.ctx), 30*time.Second)
	defer cancel()
	start := time.Now()
	resp, err := f(ctx, req, grpc.WaitForReady(true))
	fmt.Printf("\n%-26s %8s  %s\n", name, time.Since(start).Round(10*time.Microsecond), note)
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	return resp, err
}

// show prints the output of a program, indented.
func show(name string, args ...string) {
	cmd := command(name, args...)
	cmd.Stdout = nil
	out, err := cmd.Output()
	if err != nil {
		fmt.Printf("    %s: no output\n", name)
		return
	}
	for line := range strings.Lines(string(out)) {
		fmt.Print("    ", line)
	}
}

// ready waits until the driver has opened its pool.
func (l *life) ready() error {
	ctx, cancel := context.WithTimeout(l.ctx, 30*time.Second)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		resp, err := l.identity.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if err != nil {
			return err
		}
		if resp.GetReady().GetValue() {
			_, err := call(l, "Probe", l.identity.Probe, &csi.ProbeRequest{}, "the driver is ready")
			return err
		}
		<-tick.C
	}
}

// create and the other methods without parameters are the steps of run. A step that must be undone appends
// a function to undo.
func (l *life) create() error {
	resp, err := call(l, "CreateVolume", l.control.CreateVolume, &csi.CreateVolumeRequest{
		Name: "pvc-demo", CapacityRange: &csi.CapacityRange{RequiredBytes: gib}, VolumeCapabilities: []*csi.VolumeCapability{l.capability()},
		Parameters: map[string]string{"backend": l.backend},
	}, "1 GiB"+l.ofImage(", thin: an image file with an empty "+l.fsType+", and a record"))
	if err != nil {
		return err
	}
	l.id = resp.GetVolume().GetVolumeId()
	l.undo = append(l.undo, func() error {
		_, err := call(l, "DeleteVolume", l.control.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: l.id}, "one rename into the trash")
		return err
	})
	fmt.Println("    volume", l.id)
	show("ls", "-lsh", l.folder())
	return nil
}

func (l *life) publishToNode() error {
	_, err := call(l, "ControllerPublishVolume", l.control.ControllerPublishVolume, &csi.ControllerPublishVolumeRequest{
		VolumeId: l.id, NodeId: "demo", VolumeCapability: l.capability(),
	}, "recorded for one node")
	if err == nil {
		l.undo = append(l.undo, func() error {
			_, err := call(l, "ControllerUnpublishVolume", l.control.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: l.id, NodeId: "demo"}, "")
			return err
		})
	}
	return err
}

func (l *life) stage() error {
	if err := os.Mkdir(l.path("staging"), 0o755); err != nil {
		return err
	}
	_, err := call(l, "NodeStageVolume", l.node.NodeStageVolume, &csi.NodeStageVolumeRequest{
		VolumeId: l.id, StagingTargetPath: l.path("staging"), VolumeCapability: l.capability(),
	}, l.ofImage("loop device, ")+"the node's mount of the volume")
	if err != nil {
		return err
	}
	l.undo = append(l.undo, func() error {
		_, err := call(l, "NodeUnstageVolume", l.node.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: l.id, StagingTargetPath: l.path("staging")}, "unmounted"+l.ofImage(", device free"))
		l.device("-n", "-l", "-O", "NAME,BACK-FILE")
		return err
	})
	show("findmnt", "-n", l.path("staging"))
	l.device("-l", "-O", "NAME,DIO,LOG-SEC,AUTOCLEAR,BACK-FILE")
	return nil
}

// device prints what losetup(8) reports for the volume if it is a disk image.
func (l *life) device(options ...string) {
	if l.fsType != "" {
		show("losetup", append(options, "-j", l.folder()+"/image")...)
	}
}

// publish publishes the volume at a path in l.dir.
func (l *life) publish(target string, readOnly bool, note string) error {
	_, err := call(l, "NodePublishVolume", l.node.NodePublishVolume, &csi.NodePublishVolumeRequest{
		VolumeId: l.id, StagingTargetPath: l.path("staging"), TargetPath: l.path(target), VolumeCapability: l.capability(), Readonly: readOnly,
	}, note)
	if err != nil {
		return err
	}
	l.undo = append(l.undo, func() error {
		_, err := call(l, "NodeUnpublishVolume", l.node.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: l.id, TargetPath: l.path(target)}, target)
		return err
	})
	show("findmnt", "-n", l.path(target))
	return nil
}

func (l *life) publishFirst() error  { return l.publish("pod-1", false, "for a pod, read-write") }
func (l *life) publishSecond() error { return l.publish("pod-2", true, "for another pod, read-only") }

// letter is the content of the file that one pod writes and another pod reads.
const letter = "written by one pod, read by another\n"

func (l *life) write() error {
	fmt.Printf("\n$ echo … > pod-1/letter\n")
	return os.WriteFile(l.path("pod-1/letter"), []byte(letter), 0o644)
}

func (l *life) readBack() error {
	b, err := os.ReadFile(l.path("pod-2/letter"))
	if err != nil {
		return err
	}
	if string(b) != letter {
		return fmt.Errorf("got %q from pod-2/letter, want %q", b, letter)
	}
	fmt.Printf("\n$ cat pod-2/letter\n    %s", b)
	err = os.WriteFile(l.path("pod-2/letter"), nil, 0o644)
	if err == nil {
		return errors.New("a write to pod-2 succeeded, although pod-2 is mounted read-only")
	}
	fmt.Printf("$ : > pod-2/letter\n    %v\n", err)
	return nil
}

func (l *life) grow() error {
	_, err := call(l, "ControllerExpandVolume", l.control.ControllerExpandVolume, &csi.ControllerExpandVolumeRequest{
		VolumeId: l.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * gib},
	}, "to 2 GiB, while it is mounted")
	return err
}

func (l *life) growOnNode() error {
	_, err := call(l, "NodeExpandVolume", l.node.NodeExpandVolume, &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.path("pod-1")}, l.ofImage("the device and the filesystem grow"))
	show("findmnt", "-n", "-o", "TARGET,SOURCE,SIZE,AVAIL", l.path("pod-1"))
	return err
}

func (l *life) stats() error {
	resp, err := call(l, "NodeGetVolumeStats", l.node.NodeGetVolumeStats, &csi.NodeGetVolumeStatsRequest{VolumeId: l.id, VolumePath: l.path("pod-1")}, "")
	for _, u := range resp.GetUsage() {
		fmt.Printf("    %-6s used %d of %d\n", strings.ToLower(u.GetUnit().String()), u.GetUsed(), u.GetTotal())
	}
	return err
}

func (l *life) list() error {
	resp, err := call(l, "ListVolumes", l.control.ListVolumes, &csi.ListVolumesRequest{}, "")
	for _, e := range resp.GetEntries() {
		fmt.Printf("    %s  %d bytes  on %v\n", e.GetVolume().GetVolumeId(), e.GetVolume().GetCapacityBytes(), e.GetStatus().GetPublishedNodeIds())
	}
	return err
}
