"""The dashboard at `/ui`: pages made here from what the ranks, the trainer and the run folder say.

::

    app        the routes, and the headers of every page
    logins     browsers that are logged in, and the rate of wrong keys
    ranks      reads from ranks, with the visitor's own key
    scrape     the parts' metrics as numbers, and rates between two scrapes
    overview   what the overview shows
    alarms     what is wrong, in words, and what to do about it
    tasks      the tasks of the latest sessions
    service_files  settings, keys and logs
    training   the steps in `metrics.jsonl`, and their charts
    chart      the geometry of a line chart
    group      what a group's page shows
    advantage  the advantages of a session's calls, from its group's scores
    trajectory what a session's page shows
    render     the templates

Nothing is stored: pages are made from bounded reads. A page shows what it got, and names the rest.
"""
