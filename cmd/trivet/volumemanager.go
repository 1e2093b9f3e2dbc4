package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/claim"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins/csi"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

const volumeManagerUsage = `usage: trivet volume-manager [FLAG]...           mount the volumes of the pods in a directory of manifests
       trivet volume-manager status [FLAG]...    show the volumes and their problems
       trivet volume-manager wait POD [FLAG]...  wait until a pod's volumes are mounted, and print their paths

status and wait also have --help. Flags of trivet volume-manager:
`

func runVolumeManager(args []string) error {
	if len(args) > 0 {
		switch args[0] {
		case "status":
			return runVolumeStatus(args[1:])
		case "wait":
			return runVolumeWait(args[1:])
		case "help":
			args = []string{"--help"}
		}
	}
	flags := flag.NewFlagSet("trivet volume-manager", flag.ContinueOnError)
	flags.Usage = func() {
		_, _ = fmt.Fprint(flags.Output(), volumeManagerUsage)
		flags.PrintDefaults()
	}
	var o volumemanager.Options
	rootDir := rootDirFlag(flags)
	flags.StringVar(&o.Manifests, "manifests", "/etc/trivet/manifests", "`directory` of the Kubernetes manifests")
	flags.StringVar(&o.Registry, "plugins-registry", "", "`directory` where CSI drivers register; empty: plugins_registry below --root-dir")
	flags.StringVar(&o.FlexVolumes, "volume-plugin-dir", "/usr/libexec/kubernetes/kubelet-plugins/volume/exec", "`directory` of FlexVolume executables")
	flags.StringVar(&o.HTTPAddress, "http-address", "127.0.0.1:9811", "`host:port` of /metrics, /healthz and the issuer of service-account tokens, which is http://NODE-NAME:port if the host is omitted or means all addresses; empty for none")
	flags.StringVar(&o.NodeName, "node-name", "", "`name` of this machine; empty: its hostname")
	klog.InitFlags(flags)
	if err := parse(flags, args); err != nil {
		return err
	}
	var err error
	if o.RootDir, err = filepath.Abs(*rootDir); err != nil {
		return err
	}
	if o.Registry == "" {
		o.Registry = filepath.Join(o.RootDir, "plugins_registry")
	}
	if o.NodeName == "" {
		if o.NodeName, err = os.Hostname(); err != nil {
			return err
		}
	}
	defer klog.Flush()
	ctx, stop := untilSignal()
	defer stop()
	return volumemanager.Run(ctx, o)
}

func rootDirFlag(flags *flag.FlagSet) *string {
	return flags.String("root-dir", "/var/lib/trivet/volume-manager", "`directory` of pods and plugins, with the layout of a kubelet's; no kubelet may use it")
}

func runVolumeStatus(args []string) error {
	flags := flag.NewFlagSet("trivet volume-manager status", flag.ContinueOnError)
	root, format := rootDirFlag(flags), outputFlag(flags, "table", "json")
	if err := parse(flags, args); err != nil {
		return err
	}
	s, err := volumemanager.ReadStatus(context.Background(), *root)
	if err != nil {
		return err
	}
	if *format == "table" {
		return writeStatus(os.Stdout, s)
	}
	return write(os.Stdout, *format, s, nil)
}

// writeStatus writes a table for each kind of object. It omits empty tables.
func writeStatus(w io.Writer, s volumemanager.Status) error {
	for _, table := range statusTables(s) {
		if len(table) < 2 {
			continue
		}
		if err := writeTable(w, table); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	return nil
}

// shownEvents is the maximum number of events in a table. The JSON output contains all events.
const shownEvents = 20

func statusTables(s volumemanager.Status) [][][]string {
	return [][][]string{
		rows("POD VOLUME PLUGIN PHASE PATH MESSAGE", s.Volumes, func(v reconciler.VolumeStatus) []string {
			return []string{v.Pod, v.Volume, v.Plugin, string(v.Phase), v.Path, progress(v)}
		}),
		rows("CLAIM PHASE VOLUME CAPACITY MESSAGE", s.Claims, func(c claim.ClaimStatus) []string {
			return []string{c.Namespace + "/" + c.Name, c.Phase, c.Volume, c.Capacity, c.Message}
		}),
		rows("PERSISTENTVOLUME PHASE CLAIM CLASS RECLAIM CAPACITY MESSAGE", s.PersistentVolumes, func(v claim.VolumeStatus) []string {
			return []string{v.Name, v.Phase, v.Claim, v.Class, v.ReclaimPolicy, v.Capacity, v.Message}
		}),
		rows("DRIVER SOCKET NODE MESSAGE", s.Drivers, func(d csi.DriverStatus) []string {
			return []string{d.Name, d.Socket, d.NodeID, d.Error}
		}),
		rows("FILE OBJECT PROBLEM", s.Problems, func(p manifest.Problem) []string {
			return []string{p.File, p.Object, p.Message}
		}),
		rows("TIME OBJECT REASON COUNT MESSAGE", s.Events[max(0, len(s.Events)-shownEvents):], func(e event.Event) []string {
			return []string{e.Time.Local().Format(time.DateTime), e.Object, e.Reason, strconv.Itoa(e.Count), e.Message}
		}),
	}
}

// progress returns the message of a volume. During an operation, the text begins with the duration of the
// operation, because a driver may hang, and the message may be about an earlier attempt.
func progress(v reconciler.VolumeStatus) string {
	idle := v.Phase == state.Pending || v.Phase == state.Mounted || v.Phase == state.Failed
	if idle || v.Since.IsZero() {
		return v.Message
	}
	took := "for " + time.Since(v.Since).Round(time.Second).String()
	if v.Message != "" {
		took += ", after: " + v.Message
	}
	return took
}

func runVolumeWait(args []string) error {
	flags := flag.NewFlagSet("trivet volume-manager wait", flag.ContinueOnError)
	root, format := rootDirFlag(flags), outputFlag(flags, "table", "json")
	timeout := flags.Duration("timeout", 2*time.Minute, "how long to wait")
	pod, err := parsePod(flags, args)
	if err != nil {
		return err
	}
	s, err := volumemanager.AwaitPod(context.Background(), *root, pod, *timeout)
	if err != nil {
		return err
	}
	if err := notReady(pod, s); err != nil {
		return err
	}
	return write(os.Stdout, *format, s, pathRows(s))
}

// parsePod parses flags, and a pod as [NAMESPACE/]NAME before, between or after the flags.
func parsePod(flags *flag.FlagSet, args []string) (pod types.NamespacedName, err error) {
	if err := flags.Parse(args); err != nil {
		return pod, flagError(err)
	}
	if flags.NArg() == 0 {
		return pod, errors.New("no pod is given: add one, as NAME or NAMESPACE/NAME")
	}
	namespace, name, found := strings.Cut(flags.Arg(0), "/")
	if !found {
		namespace, name = "default", namespace
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, parse(flags, flags.Args()[1:])
}

// notReady returns an error that states why a pod is not ready, or nil if all its volumes are mounted.
func notReady(pod types.NamespacedName, s volumemanager.PodStatus) error {
	switch {
	case !s.Known:
		return fmt.Errorf("pod %s: no manifest has it, or its manifest is invalid: run trivet volume-manager status", pod)
	case s.Ready:
		return nil
	}
	var why []string
	for _, v := range s.Volumes {
		if v.Phase != state.Mounted {
			why = append(why, strings.TrimSuffix(fmt.Sprintf("%s is %s: %s", v.Volume, v.Phase, progress(v)), ": "))
		}
	}
	return fmt.Errorf("pod %s is not ready: %s", pod, strings.Join(why, "; "))
}

// pathRows returns the volumes of a pod and their paths. It has no header, because scripts read the output.
func pathRows(s volumemanager.PodStatus) (rows [][]string) {
	for _, v := range s.Volumes {
		rows = append(rows, []string{v.Volume, v.Path})
		for _, p := range v.SubPaths {
			rows = append(rows, []string{v.Volume + "/" + p.SubPath, p.Path})
		}
	}
	return rows
}
