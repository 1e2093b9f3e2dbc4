package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/doctor"
	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/internal/webserver"
)

// nodeCheck is a check of doctor in a pod.
type nodeCheck struct {
	// Driver is the name of the node, or "controller".
	Driver string `json:"driver"`
	Pod    string `json:"pod"`
	doctor.Check
}

// podsAtOnce limits the pods in which doctor runs at the same time.
const podsAtOnce = 8

func newClusterDoctorCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Run doctor in all drivers' pods, and list its findings",
		Long: `Runs 'trivet doctor' in the pods of all drivers, and lists its findings: the warnings
and failures, or with --all every check. JSON and YAML always contain every check.

A pod whose driver is not running has one finding, the reason. The command needs the
right to create pods/exec. The exit status is 1 if a check failed, or if doctor could
not run in a pod.`,
		Example: `  kubectl trivet doctor
  kubectl trivet doctor --node worker-1 --all`,
	}
	var all bool
	node := access.nodeFlag(cmd, "check only the driver of this `node`")
	cmd.Flags().BoolVar(&all, "all", false, "list also the checks that found nothing")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, pods, err := access.pods(cmd.Context(), *node)
		if err != nil {
			return err
		}
		checks, failed := examinePods(cmd.Context(), c, pods)
		shown := checks
		if !all {
			shown = slices.DeleteFunc(slices.Clone(checks), func(n nodeCheck) bool { return n.Result == doctor.OK || n.Result == doctor.Skipped })
		}
		if err := out.write(checks, nodeCheckTable(shown)); err != nil {
			return err
		}
		if slices.ContainsFunc(checks, func(n nodeCheck) bool { return n.Result == doctor.Failure }) {
			failed = errors.Join(failed, errChecksFailed)
		}
		return failed
	}
	return cmd
}

// examinePods runs doctor in pods. The error joins those of the pods in which it could not run.
func examinePods(ctx context.Context, c *kubectl.Cluster, pods []kube.Pod) ([]nodeCheck, error) {
	results, failed := make([][]nodeCheck, len(pods)), make([]error, len(pods))
	var group errgroup.Group
	group.SetLimit(podsAtOnce)
	for i, pod := range pods {
		group.Go(func() error {
			checks, err := examinePod(ctx, c, pod)
			for _, check := range checks {
				results[i] = append(results[i], nodeCheck{driverOf(pod), pod.Metadata.Name, check})
			}
			failed[i] = err
			return nil
		})
	}
	_ = group.Wait() // the functions return no errors
	return slices.Concat(results...), errors.Join(failed...)
}

// examinePod runs doctor in a pod. If the driver's container is not running, that is its only finding.
func examinePod(ctx context.Context, c *kubectl.Cluster, pod kube.Pod) (checks []doctor.Check, err error) {
	text, err := c.Run(ctx, pod, "doctor", "--output=json")
	if err == nil {
		return checks, json.Unmarshal(text, &checks)
	}
	reason, remedy, statusErr := c.NotRunning(ctx, pod)
	if statusErr != nil || reason == "" {
		return nil, err
	}
	return []doctor.Check{{Name: "container", Result: doctor.Failure, Seen: reason, Remedy: remedy}}, nil
}

// nodeCheckTable returns the table of checks. A check with the same result in several pods of the controller has one
// row.
func nodeCheckTable(checks []nodeCheck) table {
	var distinct []nodeCheck
	for _, check := range checks {
		check.Pod = ""
		if !slices.Contains(distinct, check) {
			distinct = append(distinct, check)
		}
	}
	return newTable(
		distinct,
		column[nodeCheck]{name: "DRIVER", cell: func(n nodeCheck) string { return cmp.Or(n.Driver, "-") }},
		column[nodeCheck]{name: "CHECK", cell: func(n nodeCheck) string { return n.Name }},
		column[nodeCheck]{name: "RESULT", cell: func(n nodeCheck) string { return string(n.Result) }, color: func(n nodeCheck) color { return resultColor(n.Check) }},
		column[nodeCheck]{name: "SEEN", cell: func(n nodeCheck) string { return n.Seen }},
		column[nodeCheck]{name: "REMEDY", cell: func(n nodeCheck) string { return cmp.Or(n.Remedy, "-") }},
	)
}

// driverOf returns the name of the node of a driver's pod, or "controller".
func driverOf(p kube.Pod) string {
	if kubectl.IsController(p) {
		return "controller"
	}
	return p.Spec.NodeName
}

// pods connects, and returns the pods of the drivers, of all nodes if node is empty.
func (a *clusterAccess) pods(ctx context.Context, node string) (*kubectl.Cluster, []kube.Pod, error) {
	c, err := a.connect()
	if err != nil {
		return nil, nil, err
	}
	pods, err := c.DriverPods(ctx)
	if err != nil || node == "" {
		return c, pods, err
	}
	own := slices.DeleteFunc(pods, func(p kube.Pod) bool { return kubectl.IsController(p) || p.Spec.NodeName != node })
	if len(own) == 0 {
		return nil, nil, fmt.Errorf("--node %q has no driver: see 'kubectl trivet status' for the nodes", node)
	}
	return c, own, nil
}

// nodeFlag adds the flag --node, which is completed with the names of the nodes that have a driver.
func (a *clusterAccess) nodeFlag(cmd *cobra.Command, usage string) *string {
	node := cmd.Flags().String("node", "", usage)
	must(cmd.RegisterFlagCompletionFunc("node", a.completeNodes))
	return node
}

func (a *clusterAccess) completeNodes(cmd *cobra.Command, _ []string, _ string) (names []cobra.Completion, _ cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTimeout)
	defer cancel()
	_, pods, err := a.pods(ctx, "")
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	for _, pod := range pods {
		if !kubectl.IsController(pod) {
			names = append(names, pod.Spec.NodeName)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

func newLogsCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "logs",
		Short: "Print the logs of the drivers",
		Long: `Prints the logs of the drivers in all pods. Each line begins with the name of the node,
or with "controller".`,
		Example: `  kubectl trivet logs --since 10m
  kubectl trivet logs --node worker-1 --follow`,
	}
	var o kubectl.LogOptions
	node := access.nodeFlag(cmd, "print only the log of the driver of this `node`")
	cmd.Flags().BoolVarP(&o.Follow, "follow", "f", false, "print new lines until interrupted")
	cmd.Flags().IntVar(&o.Tail, "tail", -1, "print only this `number` of lines of each log; -1 means all")
	cmd.Flags().DurationVar(&o.Since, "since", 0, "print only lines of the last `duration`, for example 10m")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, stop := untilSignal()
		defer stop()
		c, pods, err := access.pods(ctx, *node)
		if err != nil {
			return err
		}
		err = printLogs(ctx, cmd.OutOrStdout(), c, pods, o)
		if ctx.Err() != nil { // interrupted by the user
			return nil
		}
		return err
	}
	return cmd
}

// printLogs prints the logs of pods, line by line, at the same time.
func printLogs(ctx context.Context, w io.Writer, c *kubectl.Cluster, pods []kube.Pod, o kubectl.LogOptions) error {
	var mu sync.Mutex
	var group errgroup.Group
	for _, pod := range pods {
		group.Go(func() error {
			log, err := c.Logs(ctx, pod, o)
			if err != nil {
				return fmt.Errorf("pod %s: %w", pod.Metadata.Name, err)
			}
			defer log.Close()
			lines := bufio.NewReader(log)
			for {
				line, err := lines.ReadString('\n')
				if line != "" {
					mu.Lock()
					_, _ = fmt.Fprintf(w, "%s: %s\n", driverOf(pod), strings.TrimSuffix(line, "\n"))
					mu.Unlock()
				}
				if errors.Is(err, io.EOF) {
					return nil
				}
				if err != nil {
					return fmt.Errorf("pod %s: %w", pod.Metadata.Name, err)
				}
			}
		})
	}
	return group.Wait()
}

func newUICommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Open the status page in the browser",
		Long: `Serves the status page on this machine until you interrupt the command, and opens it in
the browser. The page shows pools, volumes with their claims, their health and what is
going on. It cannot change anything. Without the right to list PersistentVolumes, the
page shows no claims.`,
		Example: `  kubectl trivet ui

  # On a machine without a browser.
  kubectl trivet ui --port 8080 --open=false`,
	}
	var port int
	var open bool
	cmd.Flags().IntVar(&port, "port", 0, "local `port`; 0 chooses a free one")
	cmd.Flags().BoolVar(&open, "open", true, "open the page in the browser")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, stop := untilSignal()
		defer stop()
		c, err := access.connect()
		if err != nil {
			return err
		}
		if _, err := c.Report(ctx); err != nil {
			return err
		}
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", fmt.Sprintf("localhost:%d", port))
		if err != nil {
			return fmt.Errorf("--port %d: %w", port, err)
		}
		url := fmt.Sprintf("http://%s/", listener.Addr())
		_, _ = fmt.Fprintf(cmd.OutOrStdout(), "The status page is at %s until you interrupt this command (Ctrl-C).\n", url)
		if open {
			go openBrowser(ctx, cmd.ErrOrStderr(), url)
		}
		mux := http.NewServeMux()
		status.Handle(mux, c.PageReport)
		return webserver.Serve(ctx, listener, mux)
	}
	return cmd
}

// openTimeout limits the time that the program which opens the browser may take.
const openTimeout = 10 * time.Second

// openBrowser opens a page in the browser of the desktop.
func openBrowser(ctx context.Context, w io.Writer, url string) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if err := (command.Command{Name: "xdg-open", Args: []string{url}}).Run(ctx); err != nil {
		_, _ = fmt.Fprintf(w, "The page could not be opened in a browser (%v): open %s yourself.\n", err, url)
	}
}
