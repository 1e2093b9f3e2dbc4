package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/volume"
)

// The names of this program as a plugin of kubectl, and as the program from which kubectl gets the completions of the
// plugin's command line.
const (
	pluginName     = "kubectl-trivet"
	completionName = "kubectl_complete-trivet"
)

// completionTimeout limits the requests of a completion, during which the shell does not respond.
const completionTimeout = 3 * time.Second

// newPluginCommand returns the command tree of `kubectl trivet`.
func newPluginCommand() root {
	access := &clusterAccess{}
	cmd := &cobra.Command{
		Use:         pluginName,
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl trivet"},
		Short:       "Show the drivers, pools and volumes of Trivet in a cluster, and move, copy and recover volumes",
		Long: `Shows the drivers, pools, volumes and snapshots of Trivet in a cluster, with the rights
of your kubeconfig. Only move, drain, protect, recover and trim change anything.

Most commands fetch the report of the controller's driver through a forwarded port,
which needs the right to create pods/portforward in the namespace of the drivers.
doctor, trim and check need the right to create pods/exec.`,
		Example: `  kubectl trivet status
  kubectl trivet volumes -o wide
  kubectl trivet ui`,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	access.addFlags(cmd)
	cmd.AddCommand(
		newClusterStatusCommand(access), newClusterVolumesCommand(access), newOrphansCommand(access), newTopCommand(access),
		newClusterDoctorCommand(access), newLogsCommand(access), newUICommand(access), newMoveCommand(access), newDrainCommand(access),
		newProtectCommand(access), newRecoverCommand(access), newClusterTrimCommand(access), newClusterCheckCommand(access), newVersionCommand("kubectl trivet"),
	)
	cmd.SetHelpCommand(newHelpCommand("  kubectl trivet help volumes"))
	cmd.InitDefaultHelpCmd()
	prepare(cmd)
	return root{cmd}
}

// clusterAccess holds the flags that name a cluster and an installation in it.
type clusterAccess struct {
	rules     *clientcmd.ClientConfigLoadingRules
	overrides clientcmd.ConfigOverrides
	namespace string
}

// addFlags adds the flags of kubectl for access to a cluster.
func (a *clusterAccess) addFlags(cmd *cobra.Command) {
	flags := cmd.PersistentFlags()
	flags.StringVar(&a.namespace, "trivet-namespace", "trivet-system", "`namespace` of the drivers' pods")
	a.rules = clientcmd.NewDefaultClientConfigLoadingRules()
	flags.StringVar(&a.rules.ExplicitPath, clientcmd.RecommendedConfigPathFlag, "", "kubeconfig `file`; default: $KUBECONFIG, or ~/.kube/config")
	names := clientcmd.RecommendedConfigOverrideFlags("")
	names.ContextOverrideFlags.Namespace.LongName = "" // only the commands for one claim depend on the namespace of the context, and have the flag themselves
	names.Timeout.Description = "`duration` for which a command waits for an answer of the API server, for example 30s; 0: 10s"
	clientcmd.BindOverrideFlags(&a.overrides, flags, names)
}

func (a *clusterAccess) connect() (*kubectl.Cluster, error) {
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(a.rules, &a.overrides).ClientConfig()
	if err != nil {
		return nil, err
	}
	return kubectl.Connect(config, a.namespace)
}

// claimNamespace returns the namespace that the user has selected: by --namespace, otherwise that of the context.
func (a *clusterAccess) claimNamespace() (string, error) {
	namespace, _, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(a.rules, &a.overrides).Namespace()
	return namespace, err
}

// report connects, and fetches the report of the drivers.
func (a *clusterAccess) report(ctx context.Context) (*kubectl.Cluster, status.Report, error) {
	c, err := a.connect()
	if err != nil {
		return nil, status.Report{}, err
	}
	r, err := c.Report(ctx)
	return c, r, err
}

// clusterStatus is the output of `kubectl trivet status`.
type clusterStatus struct {
	Driver  string        `json:"driver"`
	Drivers []driverPod   `json:"drivers"`
	Pools   []status.Pool `json:"pools"`
}

// driverPod is a pod of a driver, with what its driver reports.
type driverPod struct {
	Pod        string    `json:"pod"`
	Node       string    `json:"node"`
	Controller bool      `json:"controller"`
	Ready      bool      `json:"ready"`
	Version    string    `json:"version,omitempty"`
	Expires    time.Time `json:"certificateExpires,omitzero"`
	Problem    string    `json:"problem,omitempty"`
	// Images are the images of the containers by name.
	Images map[string]string `json:"images"`
}

func newClusterStatusCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the drivers and the pools",
		Long: `Shows the pods of the drivers with their versions, sidecars and certificates, and the
pools with their used and promised space. In the bar of a pool, # is used space and
= is space that is promised to volumes but not used yet.

The exit status is 1 if a driver does not report or a pool is not open.`,
		Example: `  kubectl trivet status
  kubectl trivet status -o wide`,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, r, err := access.report(cmd.Context())
		if err != nil {
			return err
		}
		pods, err := c.DriverPods(cmd.Context())
		if err != nil {
			return err
		}
		s := clusterStatus{Driver: r.Driver, Drivers: driverPods(pods, r), Pools: r.Pools}
		if err := out.write(s, driverTable(s.Drivers), poolTable(s.Pools)); err != nil {
			return err
		}
		if len(r.Missing()) > 0 {
			return errIncomplete
		}
		return nil
	}
	return cmd
}

// driverPods joins the pods of the drivers with the processes of a report. Of several pods of the controller only
// one reports.
func driverPods(pods []kube.Pod, r status.Report) []driverPod {
	byNode := map[string]status.Process{}
	for _, p := range r.Processes {
		byNode[p.Node] = p
	}
	var joined []driverPod
	for _, p := range pods {
		d := driverPod{Pod: p.Metadata.Name, Node: p.Spec.NodeName, Controller: kubectl.IsController(p), Ready: p.Ready(), Images: map[string]string{}}
		for _, c := range p.Spec.Containers {
			d.Images[c.Name] = c.Image
		}
		name := d.Node
		if d.Controller {
			name = ""
		}
		process := byNode[name]
		d.Version, d.Expires, d.Problem = process.Version, process.CertificateExpires, process.Problem
		joined = append(joined, d)
	}
	return joined
}

func driverTable(all []driverPod) table {
	return newTable(
		all,
		column[driverPod]{name: "DRIVER", cell: func(d driverPod) string {
			if d.Controller {
				return "controller"
			}
			return d.Node
		}},
		column[driverPod]{name: "POD", cell: func(d driverPod) string { return d.Pod }},
		column[driverPod]{name: "READY", cell: func(d driverPod) string { return yesNo(d.Ready) }, color: func(d driverPod) color { return goodIf(d.Ready) }},
		column[driverPod]{name: "VERSION", cell: func(d driverPod) string { return cmp.Or(d.Version, "-") }},
		column[driverPod]{name: "CERTIFICATE", cell: func(d driverPod) string {
			if d.Expires.IsZero() {
				return "-"
			}
			return "until " + d.Expires.Format(time.DateTime)
		}},
		column[driverPod]{name: "SIDECARS", wide: true, cell: func(d driverPod) string { return strings.Join(sidecars(d.Images), " ") }},
		column[driverPod]{name: "PROBLEM", cell: func(d driverPod) string { return cmp.Or(d.Problem, "-") }, color: func(d driverPod) color { return goodIf(d.Problem == "") }},
	)
}

// sidecars returns the containers other than the driver, with the tags of their images.
func sidecars(images map[string]string) (all []string) {
	for _, name := range slices.Sorted(maps.Keys(images)) {
		if name != "trivet" {
			image := images[name]
			all = append(all, name+image[strings.LastIndexByte(image, ':'):])
		}
	}
	return all
}

func poolTable(all []status.Pool) table {
	size := func(name string, wide bool, of func(status.Pool) int64) column[status.Pool] {
		return column[status.Pool]{name: name, wide: wide, cell: func(p status.Pool) string { return volume.FormatSize(of(p)) }}
	}
	number := func(name string, wide bool, of func(status.Pool) int) column[status.Pool] {
		return column[status.Pool]{name: name, wide: wide, cell: func(p status.Pool) string { return fmt.Sprint(of(p)) }}
	}
	return newTable(
		all,
		column[status.Pool]{name: "POOL", cell: func(p status.Pool) string { return p.Name }},
		column[status.Pool]{name: "NODE", cell: func(p status.Pool) string { return cmp.Or(p.Node, "any") }},
		column[status.Pool]{name: "FILL", cell: func(p status.Pool) string { return textBar(status.PoolBar(p)) }},
		size("USED", false, func(p status.Pool) int64 { return p.UsedBytes }),
		size("PROMISED", false, func(p status.Pool) int64 { return p.PromisedBytes }),
		size("SIZE", false, func(p status.Pool) int64 { return p.SizeBytes }),
		size("ROOM", false, func(p status.Pool) int64 { return p.RoomBytes }),
		size("FREE", true, func(p status.Pool) int64 { return p.FreeBytes }),
		size("RESERVE", true, func(p status.Pool) int64 { return p.ReserveBytes }),
		number("VOLUMES", false, func(p status.Pool) int { return p.Volumes }),
		number("SNAPSHOTS", true, func(p status.Pool) int { return p.Snapshots }),
		number("TRASH", true, func(p status.Pool) int { return p.Trash }),
		number("COPIES", true, func(p status.Pool) int { return p.Copies }),
		column[status.Pool]{name: "PROBLEM", cell: func(p status.Pool) string { return cmp.Or(p.Problem, "-") }, color: func(p status.Pool) color { return goodIf(p.Problem == "") }},
	)
}

// barWidth is the number of characters of the bar of a pool.
const barWidth = 20

// textBar returns the bar of a pool as text.
func textBar(b status.Bar) string {
	used := int(b.Used * barWidth / 100)
	promised := min(barWidth-used, int(b.Promised*barWidth/100))
	return "[" + strings.Repeat("#", used) + strings.Repeat("=", promised) + strings.Repeat(".", barWidth-used-promised) + "]"
}

func newClusterVolumesCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "volumes",
		Short: "List the volumes with their claims and pods",
		Long: `Lists the volumes of all pools, with their claims, the pods that use them, their
snapshots and their health. If the PersistentVolume of a volume is not bound, its phase
is beside the claim: the claim of a released one no longer exists.

The exit status is 1 if a driver does not report or a pool is not open, because the
list may then be incomplete.`,
		Example: `  kubectl trivet volumes

  # The volumes that are not healthy.
  kubectl trivet volumes -o json | jq '.[] | select(.health)'`,
	}
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, r, err := access.report(cmd.Context())
		if err != nil {
			return err
		}
		all, err := c.Volumes(cmd.Context(), r)
		if err != nil {
			return err
		}
		return cmp.Or(out.write(all, clusterVolumeTable(all)), incompleteReport(r))
	}
	return cmd
}

// incompleteReport returns an error that names what is missing in a report, or nil.
func incompleteReport(r status.Report) error {
	missing := r.Missing()
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("the list may be incomplete: %s", strings.Join(missing, "; "))
}

func clusterVolumeTable(all []kubectl.Volume) table {
	text := func(name string, wide bool, of func(kubectl.Volume) string) column[kubectl.Volume] {
		return column[kubectl.Volume]{name: name, wide: wide, cell: func(v kubectl.Volume) string { return cmp.Or(of(v), "-") }}
	}
	health := text("HEALTH", false, func(v kubectl.Volume) string { return healthText(v.Volume) })
	health.color = func(v kubectl.Volume) color { return goodIf(len(v.Health) == 0) }
	return newTable(
		all,
		text("CLAIM", false, func(v kubectl.Volume) string { return v.ClaimText() }),
		text("VOLUME", false, func(v kubectl.Volume) string { return v.Name }),
		text("NODE", false, func(v kubectl.Volume) string { return v.Node }),
		text("POOL", false, func(v kubectl.Volume) string { return v.Pool }),
		text("CONTENT", true, func(v kubectl.Volume) string { return v.Content }),
		text("SIZE", false, func(v kubectl.Volume) string { return volume.FormatSize(v.SizeBytes) }),
		text("USED", false, func(v kubectl.Volume) string {
			if v.UsedBytes < 0 {
				return "-"
			}
			return volume.FormatSize(v.UsedBytes)
		}),
		text("SNAPSHOTS", false, func(v kubectl.Volume) string { return fmt.Sprint(v.Snapshots) }),
		text("PODS", false, func(v kubectl.Volume) string { return strings.Join(v.Pods, ",") }),
		text("IN USE ON", true, func(v kubectl.Volume) string { return strings.Join(v.InUseOn(), ",") }),
		text("CLASS", true, func(v kubectl.Volume) string { return v.StorageClass }),
		text("DEVICE", true, func(v kubectl.Volume) string { return v.Device }),
		text("ID", true, func(v kubectl.Volume) string { return v.ID }),
		health,
	)
}

func healthText(v status.Volume) string {
	if len(v.Health) == 0 {
		return "ok"
	}
	var reasons []string
	for _, h := range v.Health {
		reasons = append(reasons, h.Reason)
	}
	return v.Worst() + " " + strings.Join(reasons, ",")
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func goodIf(b bool) color {
	if b {
		return green
	}
	return red
}
