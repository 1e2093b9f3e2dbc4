package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

func newVolumeWaitCommand() *cobra.Command {
	var pod types.NamespacedName
	cmd := &cobra.Command{
		Use:   "wait [NAMESPACE/]POD",
		Short: "Wait until a pod's volumes are mounted, and print their paths",
		Long: `Waits until all volumes of a pod are mounted, also for a volume manager that does not
run yet. Then it prints a line with the name and the path of each volume, without a
header, and a line VOLUME/SUBPATH with the path of each subPath. The default namespace
is "default". JSON and YAML also contain known, which is true if a manifest declares the
pod, and ready.

If the time is over, it prints the reasons to standard error and nothing to standard
output, and the exit status is 1. The same happens if no manifest declares the pod.`,
		Example: `  # The path of the volume "data" of the pod "web".
  trivet volume-manager wait web | awk '$1 == "data" {print $2}'

  # Wait longer, for a pod of another namespace.
  trivet volume-manager wait --timeout 10m shop/db`,
		Args: func(_ *cobra.Command, args []string) (err error) {
			pod, err = parsePod(args)
			return err
		},
	}
	root := rootDirFlag(cmd)
	timeout := cmd.Flags().Duration("timeout", 2*time.Minute, "how long to wait")
	out := outputFlag(cmd)
	cmd.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return podNames(*root), cobra.ShellCompDirectiveNoFileComp
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		bar := startProgress(cmd.ErrOrStderr())
		bar.next("Waiting for the volumes of pod %s", pod)
		s, err := volumemanager.AwaitPod(context.Background(), *root, pod, *timeout)
		bar.end()
		if err == nil {
			err = notReady(pod, s)
		}
		if err != nil {
			return err
		}
		return out.write(s, pathTable(s))
	}
	return cmd
}

// parsePod returns the pod that the only argument names as [NAMESPACE/]NAME.
func parsePod(args []string) (pod types.NamespacedName, err error) {
	switch len(args) {
	case 0:
		return pod, errors.New("no pod is given: add one, as NAME or NAMESPACE/NAME")
	case 1:
	default:
		return pod, fmt.Errorf("unexpected argument %q", args[1])
	}
	namespace, name, found := strings.Cut(args[0], "/")
	if !found {
		namespace, name = "default", namespace
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, nil
}

// podNames returns the pods of the running volume manager, for completion.
func podNames(root string) (names []string) {
	s, err := volumemanager.ReadStatus(context.Background(), root)
	if err != nil {
		return nil
	}
	for _, v := range s.Volumes {
		if v.Pod != "" && !slices.Contains(names, v.Pod) {
			names = append(names, v.Pod)
		}
	}
	return names
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
			why = append(why, strings.TrimSuffix(fmt.Sprintf("%s is %s: %s", v.Volume, v.Phase, currentMessage(v)), ": "))
		}
	}
	return fmt.Errorf("pod %s is not ready: %s", pod, strings.Join(why, "; "))
}

// mountedPath is the path of a volume or of one of its subPaths.
type mountedPath struct{ name, path, plugin string }

// pathTable returns the volumes of a pod and their paths.
func pathTable(s volumemanager.PodStatus) table {
	var paths []mountedPath
	for _, v := range s.Volumes {
		paths = append(paths, mountedPath{v.Volume, v.Path, v.Plugin})
		for _, p := range v.SubPaths {
			paths = append(paths, mountedPath{v.Volume + "/" + p.SubPath, p.Path, v.Plugin})
		}
	}
	t := newTable(
		paths,
		column[mountedPath]{name: "VOLUME", cell: func(p mountedPath) string { return p.name }},
		column[mountedPath]{name: "PATH", cell: func(p mountedPath) string { return p.path }},
		column[mountedPath]{name: "PLUGIN", wide: true, cell: func(p mountedPath) string { return p.plugin }},
	)
	t.noHeader = true // scripts read the output
	return t
}
